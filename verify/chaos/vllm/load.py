"""The requests of one run: some are streamed, and some are given up by their client.

The tokens of each must equal an aggregated server's.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx2

from verify.chaos.completions import complete

MAX_TOKENS: Final = 48
# The router's deadlines are 20 s to the first token and 20 s between two tokens.
HANG_SECONDS: Final = 45.0
_ABORTED: Final = 0.25
_ABORT_SECONDS: Final = 0.8
_CLIENTS: Final = 4
_THINK_SECONDS: Final = 0.4


class Became(enum.StrEnum):
    """The outcome of a request."""

    RIGHT = "right"
    FAILED = "failed"
    ABORTED = "aborted"
    WRONG = "wrong"
    HANGING = "hanging"


@dataclass(slots=True)
class Sent:
    """One request. Times are those of time.monotonic()."""

    request_id: str
    prompt: list[int]
    expected: list[int]
    """The right tokens, as many as the request asks for."""
    streamed: bool
    patience: float | None
    """The seconds after which its client leaves; None if it stays."""
    began: float = 0.0
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    failure: str | None = None
    became: Became | None = None


def requests(
    rng: random.Random,
    prompts: Sequence[tuple[list[int], list[int]]],
    *,
    first: int = 0,
    aborted: float = _ABORTED,
    most_tokens: int = MAX_TOKENS,
) -> list[Sent]:
    """Returns one request for each prompt and its MAX_TOKENS expected tokens. Requests are numbered
    from `first`; `aborted` is the share of clients that leave."""
    return [
        Sent(
            request_id=f"chaos-{number}",
            prompt=prompt,
            expected=expected[: rng.randint(1, most_tokens)],
            streamed=rng.random() < 0.5,
            patience=rng.uniform(0.005, _ABORT_SECONDS) if rng.random() < aborted else None,
        )
        for number, (prompt, expected) in enumerate(prompts, first)
    ]


class Load:
    """A number of clients, each with one request at a time and a pause after it. Loop only."""

    def __init__(
        self,
        http: httpx2.AsyncClient,
        rng: random.Random,
        *,
        clients: int = _CLIENTS,
        think_seconds: float = _THINK_SECONDS,
    ) -> None:
        self._http, self._rng = http, rng
        self._clients, self._think_seconds = clients, think_seconds
        self.begun = 0
        self.flowing = asyncio.Event()
        """The event that permits requests to begin."""
        self.flowing.set()

    async def run(self, batch: Sequence[Sent]) -> None:
        waiting = list(reversed(batch))

        async def client() -> None:
            while True:
                await self.flowing.wait()
                if not waiting:
                    return
                sent = waiting.pop()
                self.begun += 1
                await self._ask(sent)
                await asyncio.sleep(self._rng.uniform(0, self._think_seconds))

        async with asyncio.TaskGroup() as clients:
            for _ in range(self._clients):
                clients.create_task(client())

    async def _ask(self, sent: Sent) -> None:
        patience = HANG_SECONDS if sent.patience is None else sent.patience
        body = {
            "model": "tiny",
            "prompt": sent.prompt,
            "max_tokens": len(sent.expected),
            "temperature": 0,
            "return_token_ids": True,
        }
        sent.began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                await complete(self._http, sent, body, sent.request_id)
        except TimeoutError:
            sent.became = Became.HANGING if sent.patience is None else Became.ABORTED
        except (httpx2.HTTPError, ValueError, KeyError) as error:
            sent.failure = f"{type(error).__name__}: {error}"
        sent.ended = time.monotonic()
        if sent.tokens != sent.expected[: len(sent.tokens)]:
            sent.became = Became.WRONG
        elif sent.became is None:
            whole = len(sent.tokens) == len(sent.expected)
            sent.became = Became.RIGHT if whole else Became.WRONG
            if sent.failure is not None:
                sent.became = Became.FAILED
