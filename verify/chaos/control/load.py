"""Constant load on the router. Compares every answer with the answer of a single process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx2

from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.runner import BLOCK_SIZE, ModelRunner, load_model
from verify.chaos.completions import Prompt, complete

MAX_TOKENS: Final = 16
# A request without an answer in this time hangs.
HANG_SECONDS: Final = 60.0


@dataclass(slots=True)
class Sent:
    """One request and its outcome."""

    streamed: bool
    began: float
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    right: bool = False
    wrong: bool = False
    """True if it succeeded with other tokens, or a token differs from the single process's."""
    failure: str | None = None


def prompts(texts: Sequence[str]) -> list[Prompt]:
    """Returns prompts of `texts`, each with the tokens of a single process."""
    model, tokenizer = load_model(None)
    encoded = [tokenizer.encode(text) for text in texts]
    longest = max(len(tokens) for tokens in encoded)
    blocks = -(-(longest + MAX_TOKENS) // BLOCK_SIZE)
    runner = ModelRunner(model, tokenizer, PagedKvCache(model.config, blocks, BLOCK_SIZE))
    return [
        Prompt(list(tokens), runner.generate(tokens, MAX_TOKENS, ignore_eos=True))
        for tokens in encoded
    ]


class Load:
    """Requests to the router, every second one streamed."""

    def __init__(self, http: httpx2.AsyncClient, model: str, prompts: list[Prompt]) -> None:
        self.sent: list[Sent] = []
        self._http, self._model = http, model
        self._prompts = itertools.cycle(prompts)
        self._stopping = asyncio.Event()

    async def closed(self, number: int, *, concurrency: int) -> float:
        """Sends `number` requests, `concurrency` at once. Returns the number per second."""
        began = time.monotonic()
        gate = asyncio.Semaphore(concurrency)

        async def one() -> None:
            async with gate:
                await self._ask(self._next(), next(self._prompts))

        await asyncio.gather(*(one() for _ in range(number)))
        return number / (time.monotonic() - began)

    async def run(self, rate: float) -> None:
        """Sends `rate` requests per second until stop(), without waiting for answers. Returns once
        every request has ended."""
        async with asyncio.TaskGroup() as requests:
            due = time.monotonic()
            while not self._stopping.is_set():
                requests.create_task(self._ask(self._next(), next(self._prompts)))
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    def stop(self) -> None:
        self._stopping.set()

    @property
    def streaming(self) -> int:
        """The number of streams that have some tokens, but not all."""
        return sum(bool(s.tokens) and not (s.right or s.wrong or s.failure) for s in self.sent)

    def _next(self) -> Sent:
        sent = Sent(streamed=len(self.sent) % 2 == 0, began=time.monotonic())
        self.sent.append(sent)
        return sent

    async def _ask(self, sent: Sent, prompt: Prompt) -> None:
        body = {
            "model": self._model,
            "prompt": prompt.tokens,
            "max_tokens": MAX_TOKENS,
            "return_token_ids": True,
        }
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await complete(self._http, sent, body)
        except TimeoutError:
            sent.failure = f"no end within {HANG_SECONDS:g} s"
        except (httpx2.HTTPError, ValueError, KeyError) as error:
            sent.failure = f"{type(error).__name__}: {error}"
        sent.seconds = time.monotonic() - sent.began
        if sent.failure is None:
            sent.right = sent.tokens == prompt.expected
        sent.wrong = not sent.right and (
            sent.failure is None or sent.tokens != prompt.expected[: len(sent.tokens)]
        )
