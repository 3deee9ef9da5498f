"""The calls to Redis: each has a deadline, and none is tried while Redis is unavailable."""

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
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
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
_RETRY_SECONDS: Final = 0.1
_SCANNED: Final = 100
# The answers of a server that runs but cannot serve now; other ResponseErrors are defects.
_UNABLE: Final = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY")

_log = logging.getLogger("kvxfer.registry")


@dataclass(frozen=True, slots=True)
class _Asked:
    step: Step
    arguments: tuple[str | bytes, ...]
    answer: asyncio.Future[list[bytes]]


class Link:
    """The calls to Redis from one event loop; `check` first.

    `trouble` says why Redis is unavailable; None while it is available. A failed call sets it, and
    only a sweep that Redis takes clears it: one call waits in vain, and the others do not.

    Every key begins with `prefix` and a colon. `header` returns the arguments that each script
    takes before its own.
    """

    def __init__(
        self,
        url: RedisUrl,
        *,
        prefix: str,
        header: Callable[[], tuple[str, ...]],
        timeout: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = url.name
        self.prefix = prefix
        self._header = header
        self.timeout = timeout
        self.clock = clock
        self.trouble: str | None = "not connected yet"
        self._available = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None
        self._closed = False
        self._told: str | None = None
        self._url = url
        self._client = url.client(timeout=timeout, prefix=prefix)
        self._asked: deque[_Asked] = deque()
        self._sender: asyncio.Task[None] | None = None

    @property
    def sweep(self) -> tuple[Any, ...]:
        """The arguments of EVAL for a sweep."""
        return (script("sweep").text, 1, f"{self.prefix}:", *self._header())

    def reader(self, *, block: float) -> Redis:
        """Returns a separate client for reads that block for `block` seconds."""
        return self._url.client(timeout=block + self.timeout, prefix=self.prefix)

    def check(self) -> None:
        """Starts a probe, which ends once Redis is available."""
        if self._probing is None and not self._closed:
            self._probing = asyncio.create_task(self._probe(), name="probe of the registry")

    async def _probe(self) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(self.timeout):
                        await self._client.eval(*self.sweep)
                except Exception as error:
                    self._bad(trouble_of(error) or f"{error}; {REMEDY}")
                    await asyncio.sleep(_RETRY_SECONDS)
                else:
                    break
        finally:
            self._probing = None
        self.good()

    def good(self) -> None:
        """Notes that Redis has just taken a sweep."""
        if self._closed:
            return
        self.trouble = None
        self._available.set()
        if self._told is not None:
            self._told = None
            _log.warning("the registry in Redis (%s) is available", self.name)

    def _bad(self, trouble: str) -> None:
        """Notes that Redis is unavailable or cannot do what it was asked. Logs new trouble once."""
        self.trouble = trouble
        self._available.clear()
        self.check()
        if trouble != self._told:
            self._told = trouble
            _log.warning(
                "the registry in Redis (%s) cannot be used: %s; reads are served from what was "
                "last known, anything else is answered 503",
                self.name,
                trouble,
            )

    async def available(self) -> None:
        """Returns once Redis is available."""
        await self._available.wait()

    def require(self) -> None:
        """Raises ControlPlaneUnavailable while Redis is unavailable."""
        if self.trouble is not None:
            raise self.unavailable()

    def unavailable(self, trouble: str | None = None) -> ControlPlaneUnavailable:
        """Returns the error for `trouble`, or for the trouble of Redis."""
        return ControlPlaneUnavailable(
            f"the registry in Redis ({self.name}) cannot be used: {trouble or self.trouble}; "
            "retry, and look at that server if it lasts"
        )

    async def take(self, step: Step, *arguments: str | bytes) -> list[bytes]:
        """Takes one step. Raises ControlPlaneUnavailable; it is then unknown if the step was taken.

        Steps that are asked for while others are on their way are sent together. Redis takes them
        one by one all the same, and here it costs less than half the time.
        """
        self.require()
        given = (f"{self.prefix}:", *self._header(), *arguments)
        asked = _Asked(step, given, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name="steps of the registry")
        return await asked.answer

    async def hash(self, key: str) -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", await self._read(self._client.hgetall, key))

    async def field(self, key: str, name: str) -> bytes | None:
        return cast("bytes | None", await self._read(self._client.hget, key, name))

    async def fields(self, key: str) -> AsyncIterator[tuple[bytes, bytes]]:
        """Yields all fields of a hash, a few at a time. A field that stays is not left out."""
        cursor = 0
        while True:
            answer = await self._read(self._client.hscan, key, cursor, None, _SCANNED)
            cursor, found = answer
            for field in found.items():
                yield field
            if not cursor:
                return

    async def _read(self, command: Callable[..., Any], *arguments: str | int | None) -> Any:
        self.require()
        try:
            async with asyncio.timeout(self.timeout):
                return await command(*arguments)
        except (RedisError, OSError, TimeoutError) as error:
            raise self._failed(error) from error

    async def close(self) -> None:
        self._closed, self.trouble = True, "this control plane is stopping"
        for task in (self._sender, self._probing):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        await self._client.aclose()

    async def _send(self) -> None:
        """Sends all steps that are asked for, and those that come meanwhile."""
        batch: list[_Asked] = []
        try:
            while self._asked:
                batch = [self._asked.popleft() for _ in range(min(len(self._asked), _BATCH))]
                try:
                    self.require()
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
        """Returns the answer of Redis to each step, or an error."""
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
            return  # the caller no longer waits
        if isinstance(answer, Exception):
            future.set_exception(self._failed(answer))
        else:
            future.set_result(answer)

    def _failed(self, error: Exception) -> Exception:
        """Returns the exception to raise for an error of the client."""
        trouble = trouble_of(error)
        if trouble is not None:
            self._bad(trouble)
        elif isinstance(error, ResponseError):  # a script found something unreadable
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
    """Returns why Redis cannot serve; None if the error is a defect of this program."""
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "no answer in time"
    if isinstance(error, MovedError):
        return (
            f"the keys are at another node of the cluster, {error.host}:{error.port}; a URL that "
            "begins with redis+cluster:// follows them"
        )
    if isinstance(error, AskError):
        return f"the keys are being moved to another node of the cluster, {error.host}:{error.port}"
    if isinstance(error, MasterNotFoundError):
        # The text shows the whole client of each Sentinel before its answer.
        return re.sub(r"<.*?>\)>\)> - ", "", str(error))
    if isinstance(
        error,
        RedisConnectionError
        | BusyLoadingError
        | ClusterDownError
        | NoPermissionError
        | ReadOnlyError
        | OutOfMemoryError
        | TryAgainError
        | OSError,
    ) or (isinstance(error, ResponseError) and str(error).startswith(_UNABLE)):
        return str(error).rstrip(".") or type(error).__name__
    return None
