"""Keeps a mirror up to date: loads the whole once, then follows the log."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from redis.exceptions import RedisError

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.scheduler.redis_registry.link import Link, trouble_of
from kvxfer.scheduler.redis_registry.mirror import LogBroken, Mirror
from kvxfer.scheduler.redis_registry.records import REMEDY, id_of, reading
from kvxfer.scheduler.redis_registry.snapshot import (
    Blocks,
    Turns,
    load,
    load_blocks,
    read_all,
    read_blocks,
)

_BLOCK_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.1
_BATCH: Final = 500
# Instances whose cached blocks are read at once: at most 1.3 MB.
_BLOCKS_BATCH: Final = 8

_log = logging.getLogger("kvxfer.registry")


class Follower:
    """A task that follows the log until `stop`, and retries whatever fails.

    A failed read is tried again from the position of the mirror. Each record names the one before
    it, so missing records show; only then is the whole loaded again.

    `trouble` says why the mirror is behind; None while it follows. No step waits for a mirror that
    is behind.
    """

    def __init__(self, link: Link, mirror: Mirror) -> None:
        self.trouble: str | None = "not connected yet"
        self._link = link
        self._mirror = mirror
        self._client = link.reader(block=_BLOCK_SECONDS)
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._current_at: float | None = None
        self._told: str | None = None
        # A record that Redis has: a read from before it cannot be empty.
        self._promised = 0
        # The instances whose cached blocks are yet to be read, and the blocks that were read last.
        self._without_blocks: list[str] = []
        self._blocks: Blocks | None = None

    @property
    def behind_seconds(self) -> float:
        """Seconds since the mirror was last current."""
        at = self._current_at
        return 0.0 if at is None else self._link.clock.monotonic() - at

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

    def late(self) -> None:
        """Notes that a call waited in vain for a record."""
        self._behind("its log arrives too late")

    async def _run(self) -> None:
        whole = False
        while not self._stopping:
            try:
                if not whole:
                    await self._load()
                    whole = True
                await self._read()
            except LogBroken as broken:
                whole = False
                _log.info("the log in Redis (%s) is loaded anew: %s", self._link.name, broken)
            except (RedisError, OSError, TimeoutError) as error:
                self._behind(trouble_of(error) or f"{error}; {REMEDY}")
                self._link.check()
                await asyncio.sleep(_RETRY_SECONDS)
            except ControlPlaneUnavailable as damaged:
                whole = False
                self._behind(str(damaged))
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception as error:
                whole = False
                _log.exception("the log in Redis (%s) cannot be followed", self._link.name)
                self._behind(f"{type(error).__name__}: {error}")
                await asyncio.sleep(_RETRY_SECONDS)

    async def _load(self) -> None:
        """Loads all but the instances' cached blocks, which follow in portions."""
        await self._client.eval(*self._link.sweep)
        self._link.good()
        await load(self._mirror, await read_all(self._client, self._link.prefix))
        self._current()
        self._without_blocks = [each.instance_id for each in self._mirror.fleet.snapshot()]
        self._blocks = None
        self._promised = 0

    async def _read(self) -> None:
        block = None if self._without_blocks else int(_BLOCK_SECONDS * 1000)
        if self._without_blocks and self._blocks is None:
            names = list(islice(reversed(self._without_blocks), _BLOCKS_BATCH))
            self._blocks = await read_blocks(self._client, self._link.prefix, names)
            await self._load_blocks()
        answer: Any = await self._client.xread(
            {f"{self._link.prefix}:log": f"{self._mirror.position}-0"}, count=_BATCH, block=block
        )
        if not answer or len(answer[0][1]) < _BATCH:
            self._current()  # a call that needs these records waits until they are applied
        turns = Turns()
        for _, entries in answer:
            for entry_id, fields in entries:
                self._mirror.apply(entry_id, fields)
                await self._load_blocks()
                await turns.give()
        if not answer:
            await self._check_end()

    async def _load_blocks(self) -> None:
        """Loads the blocks that were read, once the mirror is at the record of that read."""
        blocks = self._blocks
        if blocks is not None and blocks.position <= self._mirror.position:
            await load_blocks(self._mirror, blocks)
            del self._without_blocks[-len(blocks.parts) :]
            self._blocks = None

    async def _check_end(self) -> None:
        """Raises LogBroken if nothing came although there is more, or if the log ends earlier."""
        if self._mirror.position < self._promised:
            raise LogBroken(f"it has no record {self._promised}")
        packed: Any = await self._client.get(f"{self._link.prefix}:sequence")
        with reading("the place in the log"):
            self._promised = id_of(packed or b"0")
        if self._promised < self._mirror.position:
            raise LogBroken("it is another one")

    def _current(self) -> None:
        self._current_at = self._link.clock.monotonic()
        self.trouble = None
        if self._told is not None:
            self._told = None
            _log.warning("the log of the registry in Redis (%s) is followed", self._link.name)

    def _behind(self, trouble: str) -> None:
        """Logs new trouble once until the mirror is current, and not if Redis is unavailable."""
        self.trouble = trouble
        if trouble != self._told and self._link.trouble is None:
            self._told = trouble
            _log.warning(
                "the log of the registry in Redis (%s) cannot be followed: %s; reads are served "
                "from what was last known",
                self._link.name,
                trouble,
            )
