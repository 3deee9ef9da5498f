"""The way to Redis: every call has a deadline, and while Redis is away none is even tried."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, cast

from redis.asyncio import Redis
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

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.scheduler.redis_registry.scripts import Step, script
from kvxfer.scheduler.redis_registry.url import RedisUrl

_CONCURRENT_CALLS: Final = 64
# What a server answers that is there but cannot serve now; other ResponseErrors are defects.
_UNABLE: Final = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "NOPERM", "BUSY")

_log = logging.getLogger("kvxfer.registry")


class Link:
    """Belongs to one event loop.

    `trouble` says why Redis is away; None while it is not. A call that fails sets it, and only
    whoever reads the log (Follower) clears it: so one call waits in vain, and the others do not.
    """

    def __init__(self, url: RedisUrl, *, timeout: float) -> None:
        self.name = url.name
        self.timeout = timeout
        self.trouble: str | None = "not connected yet"
        self._good_at: float | None = None
        self._told: str | None = None
        self._url = url
        self._client = url.client(timeout=timeout)
        self._gate = asyncio.Semaphore(_CONCURRENT_CALLS)

    @property
    def silent_seconds(self) -> float:
        """Since when nothing was heard."""
        return 0.0 if self._good_at is None else time.monotonic() - self._good_at

    def reader(self, *, block: float) -> Redis:
        """A client of its own for reads that block for so many seconds."""
        return self._url.client(timeout=block + self.timeout)

    def good(self) -> None:
        self.trouble = None
        self._good_at = time.monotonic()

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
                "the registry in Redis (%s) cannot be reached: %s; reads are served from what was "
                "last known, anything else is answered 503",
                self.name,
                trouble,
            )

    def unavailable(self) -> ControlPlaneUnavailable:
        return ControlPlaneUnavailable(
            f"the registry in Redis ({self.name}) cannot be reached: {self.trouble}; retry, and "
            "look at that server if it lasts"
        )

    async def take(self, step: Step, prefix: str, *arguments: str | bytes) -> list[bytes]:
        """Takes one step. Raises ControlPlaneUnavailable; whether it was taken is then unknown."""
        chosen = script(step)
        async with self._call():
            try:
                answer = await self._client.evalsha(chosen.sha, 1, prefix, *arguments)
            except NoScriptError:
                answer = await self._client.eval(chosen.text, 1, prefix, *arguments)
        return cast("list[bytes]", answer)

    async def hash(self, key: str) -> dict[bytes, bytes]:
        async with self._call():
            return cast("dict[bytes, bytes]", await self._client.hgetall(key))

    async def field(self, key: str, name: str) -> bytes | None:
        async with self._call():
            return cast("bytes | None", await self._client.hget(key, name))

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        if self.trouble is not None:
            raise self.unavailable()
        try:
            async with asyncio.timeout(self.timeout), self._gate:
                if self.trouble is not None:
                    raise self.unavailable()
                yield
        except (RedisError, OSError, TimeoutError) as error:
            trouble = trouble_of(error)
            if trouble is None:
                raise
            self.bad(trouble)
            raise self.unavailable() from error


def trouble_of(error: Exception) -> str | None:
    """What to say where Redis cannot serve; None where the error is a defect of this program."""
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "no answer in time"
    if isinstance(
        error,
        RedisConnectionError
        | BusyLoadingError
        | ReadOnlyError
        | OutOfMemoryError
        | TryAgainError
        | OSError,
    ) or (isinstance(error, ResponseError) and str(error).startswith(_UNABLE)):
        return str(error) or type(error).__name__
    return None
