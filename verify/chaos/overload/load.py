"""The requests of two tenants, and their outcomes."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httpx2

from verify.chaos.completions import Prompt

from .fleet import TENANTS

MAX_TOKENS: Final = 16
HANG_SECONDS: Final = 60.0
_PATH: Final = "/v1/completions"


@dataclass(slots=True)
class Sent:
    tenant: str
    seconds: float = 0.0
    right: bool = False
    refused: bool = False
    """True if it got a 503 with Retry-After: too many requests wait."""
    failure: str | None = None


class Load:
    """The requests to the router. `http` has a client for each tenant."""

    def __init__(self, http: dict[str, httpx2.AsyncClient], prompts: Sequence[Prompt]) -> None:
        self.sent: list[Sent] = []
        self._http = http
        self._prompts = itertools.cycle(prompts)

    async def saturate(self, seconds: float, clients: int) -> float:
        """Runs `clients` clients of each tenant. Each sends one request after the other. Returns
        the number of answers per second."""
        saturated = asyncio.Event()

        async def client(tenant: str) -> None:
            while not saturated.is_set():
                await self._ask(tenant)

        async with asyncio.TaskGroup() as tasks:
            for tenant in TENANTS * clients:
                tasks.create_task(client(tenant))
            await asyncio.sleep(seconds)
            saturated.set()
            return self._right() / seconds

    async def overload(self, rate: float, seconds: float, rng: random.Random) -> float:
        """Sends `rate` requests per second at random times, without waiting for answers; two thirds
        are from the last tenant. Returns the number of answers per second, once all requests have
        ended."""
        async with asyncio.TaskGroup() as requests:
            due, end = time.monotonic(), time.monotonic() + seconds
            while due < end:
                due += rng.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                requests.create_task(self._ask(TENANTS[rng.random() > 1 / 3]))
            return self._right() / seconds

    def _right(self) -> int:
        return sum(one.right for one in self.sent)

    async def _ask(self, tenant: str) -> None:
        sent, prompt = Sent(tenant), next(self._prompts)
        self.sent.append(sent)
        body = {
            "model": "tiny",
            "prompt": prompt.tokens,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        began = time.monotonic()
        try:
            answer = await self._http[tenant].post(_PATH, json=body)
            if answer.is_success:
                sent.right = answer.json()["choices"][0]["token_ids"] == prompt.expected
                sent.failure = None if sent.right else "the tokens differ from one server's"
            else:
                sent.refused = answer.status_code == 503 and "retry-after" in answer.headers
                sent.failure = f"{answer.status_code}: {answer.json()['error']['message']}"
        except (httpx2.HTTPError, ValueError, KeyError) as error:
            sent.failure = f"{type(error).__name__}: {error}"
        sent.seconds = time.monotonic() - began
