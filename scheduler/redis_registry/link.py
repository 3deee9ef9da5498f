"""The way to Redis: every call has a deadline, and while Redis is away none is even tried."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    BusyLoadingError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.scheduler.redis_registry.records import REMEDY
from kvxfer.scheduler.redis_registry.scripts import Step, script
from kvxfer.scheduler.redis_registry.url import RedisUrl

_BATCH: Final = 64
_SCANNED: Final = 100
# What a server answers that is there but cannot serve now; other ResponseErrors are defects.
_UNABLE: Final = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "NOPERM", "BUSY")

_log = logging.getLogger("kvxfer.registry")


@dataclass(frozen=True, slots=True)
class _Asked:
    step: Step
    arguments: tuple[str | bytes, ...]
    answer: asyncio.Future[list[bytes]]


class Link:
    """Belongs to one event loop.

    `trouble` says why Redis is away; None while it is not. A call that fails sets it, and only
    the reader of the log (Follower) clears it: so one call waits in vain, and the others do not.
    """

    def __init__(self, url: RedisUrl, *, timeout: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self.name = url.name
        self.timeout = timeout
        self.clock = clock
        self.trouble: str | None = "not connected yet"
        self._good_at: float | None = None
        self._told: str | None = None
        self._url = url
        self._client = url.client(timeout=timeout)
        self._asked: deque[_Asked] = deque()
        self._sender: asyncio.Task[None] | None = None

    @property
    def silent_seconds(self) -> float:
        """Since when nothing was heard."""
        return 0.0 if self._good_at is None else self.clock.monotonic() - self._good_at

    def reader(self, *, block: float) -> Redis:
        """A separate client for reads that block for so many seconds."""
        return self._url.client(timeout=block + self.timeout)

    def good(self) -> None:
        self.trouble = None
        self._good_at = self.clock.monotonic()

    def back(self) -> None:
        """Redis is there, and what it holds was loaded."""
        self.good()
        if self._told is not None:
            self._told = None
            _log.warning("the registry in Redis (%s) is there", self.name)

    def bad(self, trouble: str) -> None:
        """Redis is away, or cannot take what it was asked. Said once until it is back."""
        self.trouble = trouble
        if trouble != self._told:
            self._told = trouble
            _log.warning(
                "the registry in Redis (%s) cannot be used: %s; reads are served from what was "
                "last known, anything else is answered 503",
                self.name,
                trouble,
            )

    def unavailable(self) -> ControlPlaneUnavailable:
        return ControlPlaneUnavailable(
            f"the registry in Redis ({self.name}) cannot be used: {self.trouble}; retry, and "
            "look at that server if it lasts"
        )

    async def take(self, step: Step, prefix: str, *arguments: str | bytes) -> list[bytes]:
        """Takes one step. Raises ControlPlaneUnavailable; whether it was taken is then unknown.

        Steps that are asked for while others are on their way go together: for Redis it is the
        same, and here it takes less than half the time.
        """
        self._require_good()
        asked = _Asked(step, (prefix, *arguments), asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name="steps of the registry")
        return await asked.answer

    async def hash(self, key: str) -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", await self._read(self._client.hgetall, key))

    async def field(self, key: str, name: str) -> bytes | None:
        return cast("bytes | None", await self._read(self._client.hget, key, name))

    async def fields(self, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """All fields of a hash, a few at a time: none that stays is left out."""
        cursor = 0
        while True:
            answer = await self._read(self._client.hscan, key, cursor, None, _SCANNED)
            cursor, found = answer
            for field in found.items():
                yield field
            if not cursor:
                return

    async def _read(self, command: Callable[..., Any], *arguments: str | int | None) -> Any:
        self._require_good()
        try:
            async with asyncio.timeout(self.timeout):
                return await command(*arguments)
        except (RedisError, OSError, TimeoutError) as error:
            raise self._failed(error) from error

    async def close(self) -> None:
        self.trouble = "this control plane is stopping"
        if self._sender is not None:
            self._sender.cancel()
            with suppress(asyncio.CancelledError):
                await self._sender
        await self._client.aclose()

    async def _send(self) -> None:
        """Takes all steps that are asked for, and those that are by then."""
        batch: list[_Asked] = []
        try:
            while self._asked:
                batch = [self._asked.popleft() for _ in range(min(len(self._asked), _BATCH))]
                try:
                    self._require_good()
                    async with asyncio.timeout(self.timeout):
                        answers = await self._execute(batch)
                except Exception as error:
                    answers = [error] * len(batch)
                for asked, answer in zip(batch, answers, strict=True):
                    self._answer(asked.answer, answer)
        finally:
            self._sender = None
            for asked in (*batch, *self._asked):
                self._answer(asked.answer, self.unavailable())
            self._asked.clear()

    async def _execute(self, batch: Sequence[_Asked]) -> list[Any]:
        """What Redis says to each: the step's answer or an error."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for asked in batch:
                pipeline.evalsha(script(asked.step).sha, 1, *asked.arguments)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            unknown = [i for i, said in enumerate(answers) if isinstance(said, NoScriptError)]
            for i in unknown:
                pipeline.eval(script(batch[i].step).text, 1, *batch[i].arguments)
            for i, said in zip(unknown, await pipeline.execute(raise_on_error=False), strict=True):
                answers[i] = said
        return answers

    def _answer(self, future: asyncio.Future[list[bytes]], answer: Any) -> None:
        if future.done():
            return  # it is not awaited any more
        if isinstance(answer, Exception):
            future.set_exception(self._failed(answer))
        else:
            future.set_result(answer)

    def _require_good(self) -> None:
        if self.trouble is not None:
            raise self.unavailable()

    def _failed(self, error: Exception) -> Exception:
        """What to raise for an error of the client."""
        trouble = trouble_of(error)
        if trouble is not None:
            self.bad(trouble)
        elif isinstance(error, ResponseError):  # a script that came upon what it cannot read
            damaged = ControlPlaneUnavailable(
                f"the registry in Redis ({self.name}) did not take this step: {error}; {REMEDY}"
            )
            damaged.__cause__ = error
            return damaged
        elif not isinstance(error, ControlPlaneUnavailable):
            return error
        unavailable = self.unavailable()
        unavailable.__cause__ = error
        return unavailable


def trouble_of(error: Exception) -> str | None:
    """What to say where Redis cannot serve; None where the error is a defect of this program."""
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "no answer in time"
    if isinstance(error, MasterNotFoundError):
        # It shows the whole client of each Sentinel before what that one said.
        return re.sub(r"<.*?>\)>\)> - ", "", str(error))
    if isinstance(
        error,
        RedisConnectionError
        | BusyLoadingError
        | ReadOnlyError
        | OutOfMemoryError
        | TryAgainError
        | OSError,
    ) or (isinstance(error, ResponseError) and str(error).startswith(_UNABLE)):
        return str(error).rstrip(".") or type(error).__name__
    return None
