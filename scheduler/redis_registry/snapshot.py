"""All that Redis holds of a registry, read in one transaction into a mirror."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio import Redis

from kvxfer.scheduler.redis_registry.mirror import Mirror
from kvxfer.scheduler.redis_registry.records import (
    decode_change,
    decode_instance,
    decode_transfer,
    decode_update,
    hashes,
    id_of,
    reading,
)
from kvxfer.scheduler.weight_updates import UpdateLedger

_BATCH: Final = 500


async def read_all(client: Redis, prefix: str) -> list[Any]:
    """Raises RedisError."""
    async with client.pipeline(transaction=True) as pipeline:
        for key in ("sequence", "changed"):
            pipeline.get(f"{prefix}:{key}")
        for key in ("instances", "specs", "blocks", "transfers", "updates"):
            pipeline.hgetall(f"{prefix}:{key}")
        pipeline.hkeys(f"{prefix}:tables")
        pipeline.xrange(f"{prefix}:changes")
        answers: list[Any] = await pipeline.execute()
        return answers


async def load(mirror: Mirror, answers: Sequence[Any]) -> None:
    """Gives the mirror what `read_all` has read. Raises ControlPlaneUnavailable where something
    is damaged; the mirror stays as it was."""
    sequence, changed, members, specs, blocks, transfers, updates, tables, entries = answers
    fleet, changes = mirror.empty_fleet(), []
    for number, (name, member) in enumerate(members.items()):
        with reading(f"instance {_text(name)}"):
            fleet.put(decode_instance(name, member, specs[name]))
        await _give_way(number)
    for number, (name, packed) in enumerate(blocks.items()):
        with reading(f"what instance {_text(name)} has cached"):
            fleet.publish(name.decode(), hashes(packed), b"", reset=True)
        await _give_way(number)
    for number, (name, packed) in enumerate(transfers.items()):
        with reading(f"transfer {_text(name)}"):
            transfer = decode_transfer(packed)
            if transfer.transfer_id != name.decode():
                raise ValueError(f"it is {transfer.transfer_id!r}")
            fleet.open(transfer)
        await _give_way(number)
    ledger = UpdateLedger()
    for name, packed in updates.items():
        with reading(f"weight update {_text(name)}"):
            update = decode_update(packed)
            if update.update_id != name.decode():
                raise ValueError(f"it is {update.update_id!r}")
            ledger.put(update)
    for number, (entry_id, fields) in enumerate(entries):
        with reading(f"change {_text(entry_id)}"):
            changes.append(decode_change(entry_id, fields))
        await _give_way(number)
    with reading("the place in the log"):
        position = id_of(sequence or b"")
        floor = id_of((entries[0][1][b"after"] if entries else changed) or b"")
        with_table = [name.decode() for name in tables]
    mirror.replace(fleet, position, floor, changes, with_table, ledger)


def _text(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))


async def _give_way(number: int) -> None:
    """Lets requests be answered while much is decoded."""
    if number % _BATCH == _BATCH - 1:
        await asyncio.sleep(0)
