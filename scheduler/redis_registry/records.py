"""How instances, transfers and the records of the log look in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvxfer.instances import (
    Change,
    ChangeCause,
    Instance,
    InstanceSpec,
    InstanceState,
    Load,
    Reserved,
    Role,
)
from kvxfer.kv.block_table import BlockTable
from kvxfer.transfers import Transfer


class _Member(msgspec.Struct, frozen=True):
    """What the scripts keep of an instance beside its spec; they have more that only they read."""

    epoch: int
    state: InstanceState
    role: Role
    registered_at: float
    heartbeat_at: float
    reserved: Reserved
    load: Load = Load()
    drain_deadline: float | None = None


_member = msgspec.msgpack.Decoder(_Member)
_spec = msgspec.json.Decoder(InstanceSpec)
_transfer = msgspec.msgpack.Decoder(Transfer)
_table = msgspec.msgpack.Decoder(BlockTable)
_load = msgspec.msgpack.Decoder(Load)

_encode_json = msgspec.json.Encoder().encode
_encode = msgspec.msgpack.Encoder().encode


def encode_spec(spec: InstanceSpec) -> bytes:
    return _encode_json(spec)


def encode_load(load: Load | None) -> bytes:
    return b"" if load is None else _encode(load)


def decode_load(raw: bytes) -> Load | None:
    return _load.decode(raw) if raw else None


def encode_transfer(transfer: Transfer) -> bytes:
    return _encode(transfer)


def decode_transfer(raw: bytes) -> Transfer:
    return _transfer.decode(raw)


def encode_table(table: BlockTable) -> bytes:
    return _encode(table)


def decode_table(raw: bytes) -> BlockTable:
    return _table.decode(raw)


def decode_instance(member: bytes, spec: bytes) -> Instance:
    said, held = _spec.decode(spec), _member.decode(member)
    return Instance(
        instance_id=said.instance_id,
        role=held.role,
        model=said.model,
        engine_address=said.engine_address,
        http_address=said.http_address,
        layout=said.layout,
        num_blocks=said.num_blocks,
        fabrics=said.fabrics,
        rank_addresses=said.rank_addresses,
        labels=said.labels,
        epoch=held.epoch,
        state=held.state,
        registered_at=held.registered_at,
        heartbeat_at=held.heartbeat_at,
        load=held.load,
        reserved=held.reserved,
        drain_deadline=held.drain_deadline,
    )


def decode_change(entry_id: bytes, fields: Mapping[bytes, Any]) -> Change:
    return Change(
        id=id_of(entry_id),
        cause=ChangeCause(fields[b"cause"].decode()),
        instance=decode_instance(fields[b"member"], fields[b"spec"]),
    )


def id_of(entry_id: bytes) -> int:
    """The id of a record from that of its stream entry, `ID-0`."""
    return int(entry_id.partition(b"-")[0])
