"""All that Redis holds of a registry, read in one transaction into a mirror.

The instances' cached blocks, which are most of the data, follow in portions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.prefix_hashes import HASH_BYTES
from kvxfer.scheduler.redis_registry.mirror import Mirror
from kvxfer.scheduler.redis_registry.records import (
    decode_change,
    decode_instance,
    decode_transfer,
    decode_update,
    fields_of,
    id_of,
    joined,
    reading,
)
from kvxfer.scheduler.weight_updates import UpdateLedger

_TURN_SECONDS: Final = 0.005
# Bytes of hashes, a millisecond's work.
_AT_ONCE: Final = 1000 * HASH_BYTES

_log = logging.getLogger("kvxfer.registry")


class Turns:
    """Pauses in which requests are answered while much is decoded: one every few milliseconds,
    however long each part takes."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._began = self._time()

    async def give(self) -> None:
        """Pauses if it is time. To be awaited after each part."""
        if self._time() - self._began >= _TURN_SECONDS:
            await asyncio.sleep(0)
            self._began = self._time()


@dataclass(frozen=True, slots=True)
class Blocks:
    """The cached blocks of some instances at the log's record `position`, as Redis has them."""

    position: int
    parts: dict[str, Sequence[bytes | None]]


async def read_all(client: Redis, prefix: str) -> list[Any]:
    """Raises RedisError."""
    async with client.pipeline(transaction=True) as pipeline:
        for key in ("sequence", "changed"):
            pipeline.get(f"{prefix}:{key}")
        for key in ("instances", "specs", "transfers", "updates"):
            pipeline.hgetall(f"{prefix}:{key}")
        pipeline.hkeys(f"{prefix}:tables")
        pipeline.xrange(f"{prefix}:changes")
        answers: list[Any] = await pipeline.execute()
        return answers


async def read_blocks(client: Redis, prefix: str, names: Sequence[str]) -> Blocks:
    """Raises RedisError, and ControlPlaneUnavailable."""
    async with client.pipeline(transaction=True) as pipeline:
        pipeline.get(f"{prefix}:sequence")
        for name in names:
            pipeline.hmget(f"{prefix}:blocks", fields_of(name))
        sequence, *found = await pipeline.execute()
    with reading("the place in the log"):
        return Blocks(id_of(sequence or b""), dict(zip(names, found, strict=True)))


async def load_blocks(mirror: Mirror, blocks: Blocks) -> None:
    """Gives the mirror, which is at the same record, the blocks that `read_blocks` has read.

    Leaves out damaged ones: without them prompts are only paired less well.
    """
    turns = Turns()
    for name, parts in blocks.parts.items():
        try:
            with reading(f"what instance {name!r} has cached"):
                packed = joined(parts)
                for start in range(0, len(packed), _AT_ONCE):
                    portion = packed[start : start + _AT_ONCE]
                    mirror.fleet.publish(name, portion, b"", reset=start == 0)
                    await turns.give()
        except ControlPlaneUnavailable as damaged:
            _log.warning("%s", damaged)


async def load(mirror: Mirror, answers: Sequence[Any]) -> None:
    """Gives the mirror the answers that `read_all` has read. Raises ControlPlaneUnavailable if
    something is damaged; the mirror stays as it was."""
    sequence, changed, members, specs, transfers, updates, tables, entries = answers
    fleet, changes, turns = mirror.empty_fleet(), [], Turns()
    for name, member in members.items():
        with reading(f"instance {_text(name)}"):
            fleet.put(decode_instance(name, member, specs[name]))
        await turns.give()
    for name, packed in transfers.items():
        with reading(f"transfer {_text(name)}"):
            transfer = decode_transfer(packed)
            if transfer.transfer_id != name.decode():
                raise ValueError(f"it is {transfer.transfer_id!r}")
            fleet.open(transfer)
        await turns.give()
    ledger = UpdateLedger()
    for name, packed in updates.items():
        with reading(f"weight update {_text(name)}"):
            update = decode_update(packed)
            if update.update_id != name.decode():
                raise ValueError(f"it is {update.update_id!r}")
            ledger.put(update)
    for entry_id, fields in entries:
        with reading(f"change {_text(entry_id)}"):
            changes.append(decode_change(entry_id, fields))
        await turns.give()
    with reading("the place in the log"):
        position = id_of(sequence or b"")
        floor = id_of((entries[0][1][b"after"] if entries else changed) or b"")
        with_table = [name.decode() for name in tables]
    mirror.replace(fleet, position, floor, changes, with_table, ledger)


def _text(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))
