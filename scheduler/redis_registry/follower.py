"""Keeps a mirror up to date: loads the whole once, then follows the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from redis.exceptions import RedisError

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.scheduler.redis_registry.link import Link, trouble_of
from kvxfer.scheduler.redis_registry.mirror import LogBroken, Mirror
from kvxfer.scheduler.redis_registry.records import REMEDY
from kvxfer.scheduler.redis_registry.scripts import script
from kvxfer.scheduler.redis_registry.snapshot import load, read_all

_BLOCK_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.1
_BATCH: Final = 500

_log = logging.getLogger("kvxfer.registry")


class Follower:
    """One task, until `stop`. Whatever goes wrong is tried again.

    It is also what finds out whether Redis is there: it asks twice a second.
    """

    def __init__(
        self, link: Link, mirror: Mirror, prefix: str, header: Callable[[], tuple[str, ...]]
    ) -> None:
        self._link = link
        self._mirror = mirror
        self._prefix = prefix
        self._header = header
        self._client = link.reader(block=_BLOCK_SECONDS)
        self._task: asyncio.Task[None] | None = None
        self._stopping = self._doubted = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="log of the registry")

    async def stop(self) -> None:
        # Python 3.11's wait_for, in the client, may swallow a cancellation; the flag does not.
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._client.aclose()

    def doubt(self) -> None:
        """A call waited in vain for a record: load the whole again."""
        self._doubted = True

    async def _run(self) -> None:
        while not self._stopping:
            try:
                await self._load()
                self._link.back()
                while not (self._stopping or self._doubted):
                    await self._read()
                self._doubted = False
            except LogBroken as broken:
                _log.info("the log in Redis (%s) is loaded anew: %s", self._link.name, broken)
            except (RedisError, OSError, TimeoutError) as error:
                self._link.bad(trouble_of(error) or f"{error}; {REMEDY}")
                await asyncio.sleep(_RETRY_SECONDS)
            except ControlPlaneUnavailable as damaged:
                self._link.bad(str(damaged))
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception as error:
                _log.exception("the log in Redis (%s) cannot be followed", self._link.name)
                self._link.bad(f"{type(error).__name__}: {error}")
                await asyncio.sleep(_RETRY_SECONDS)

    async def _load(self) -> None:
        sweep = script("sweep")
        await self._client.eval(sweep.text, 1, self._prefix, *self._header())
        await load(self._mirror, await read_all(self._client, self._prefix))

    async def _read(self) -> None:
        answer: Any = await self._client.xread(
            {f"{self._prefix}:log": f"{self._mirror.position}-0"},
            count=_BATCH,
            block=int(_BLOCK_SECONDS * 1000),
        )
        for _, entries in answer:
            for entry_id, fields in entries:
                self._mirror.apply(entry_id, fields)
        self._link.good()
