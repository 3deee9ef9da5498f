"""The encoding of instances, transfers and log records in Redis."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import (
    Change,
    ChangeCause,
    Instance,
    InstanceSpec,
    InstanceState,
    Load,
    Reserved,
    Role,
    ToldSpec,
    Traffic,
)
from kvxfer.kv.block_table import BlockTable
from kvxfer.prefix_hashes import HASH_BYTES, KEPT_BITS
from kvxfer.transfers import Transfer
from kvxfer.unreadable import UNREADABLE
from kvxfer.weight_updates import WeightUpdate

# The parts of an instance's cached hashes, by the first digit.
PARTS: Final = 1 << (KEPT_BITS - 8 * (HASH_BYTES - 1))

REMEDY: Final = (
    "if it lasts, delete what kvxfer keeps there (by default the keys kvxfer:*), and every "
    "worker registers again"
)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raises ControlPlaneUnavailable if `what` is not as the registry writes it."""
    try:
        yield
    except (*UNREADABLE, ValueError, LookupError, struct.error) as error:
        raise ControlPlaneUnavailable(
            f"{what} in Redis is damaged ({type(error).__name__}: {error}); {REMEDY}"
        ) from error


class _Member(msgspec.Struct, frozen=True):
    """The part of the scripts' record of an instance that is read here; the spec is beside it."""

    epoch: int
    state: InstanceState
    role: Role
    registered_at: float
    heartbeat_at: float
    reserved: Reserved
    load: Load = Load()
    started: int = 0
    secret: str = ""
    drain_deadline: float | None = None


_member = msgspec.msgpack.Decoder(_Member)
_spec = msgspec.json.Decoder(ToldSpec)
_transfer = msgspec.msgpack.Decoder(Transfer)
_table = msgspec.msgpack.Decoder(BlockTable)
_update = msgspec.msgpack.Decoder(WeightUpdate)
_load = msgspec.msgpack.Decoder(Load)
_sent = msgspec.msgpack.Decoder(tuple[Traffic, ...])

_encode_json = msgspec.json.Encoder().encode
_encode = msgspec.msgpack.Encoder().encode


def encode_spec(spec: InstanceSpec) -> bytes:
    return _encode_json(spec)


def encode_load(load: Load | None) -> bytes:
    """Encodes a load without its traffic, which is kept beside it."""
    return b"" if load is None else _encode(replace(load, sent=()) if load.sent else load)


def decode_load(raw: bytes) -> Load | None:
    return _load.decode(raw) if raw else None


def encode_sent(load: Load | None) -> bytes:
    return _encode(load.sent) if load is not None and load.sent else b""


def decode_sent(raw: bytes) -> tuple[Traffic, ...]:
    return _sent.decode(raw)


def hashes(packed: bytes) -> bytes:
    """Returns packed hashes as they are. Raises ValueError if they are not whole."""
    if len(packed) % HASH_BYTES or max(packed[::HASH_BYTES], default=0) >= PARTS:
        raise ValueError("it is not made of hashes")
    return packed


def fields_of(instance_id: str) -> list[str]:
    """Returns the fields with the hashes of an instance's blocks, by their first digit."""
    return [f"{instance_id}:{part:x}" for part in range(PARTS)]


def joined(parts: Sequence[bytes | None]) -> bytes:
    """Returns the hashes that these fields have."""
    size = HASH_BYTES - 1
    whole = bytearray()
    for part, field in enumerate(parts):
        packed = field or b""
        if len(packed) % size:
            raise ValueError("it is not made of hashes")
        for at in range(0, len(packed), size):
            whole += bytes((part,)) + packed[at : at + size]
    return bytes(whole)


def encode_transfer(transfer: Transfer) -> bytes:
    return _encode(transfer)


def decode_transfer(raw: bytes) -> Transfer:
    transfer = _transfer.decode(raw)
    _require_finite(transfer.created_at, transfer.expires_at)
    if min(transfer.prefill_blocks, transfer.decode_blocks) < 0:
        raise ValueError("it holds fewer than 0 blocks")
    return transfer


def encode_update(update: WeightUpdate) -> bytes:
    return _encode(update)


def decode_update(raw: bytes) -> WeightUpdate:
    update = _update.decode(raw)
    _require_finite(update.started_at, update.decided_at, update.ended_at, update.lease_seconds)
    return update


def encode_table(table: BlockTable) -> bytes:
    return _encode(table)


def decode_table(raw: bytes) -> BlockTable:
    return _table.decode(raw)


def decode_instance(name: bytes, member: bytes, spec: bytes) -> Instance:
    said, held = _spec.decode(spec), _member.decode(member)
    if said.instance_id != name.decode():
        raise ValueError(f"it is that of {said.instance_id!r}")
    _require_finite(held.registered_at, held.heartbeat_at, held.drain_deadline)
    return Instance.of(
        said,
        role=held.role,
        epoch=held.epoch,
        state=held.state,
        registered_at=held.registered_at,
        heartbeat_at=held.heartbeat_at,
        load=held.load,
        started=held.started,
        reserved=held.reserved,
        drain_deadline=held.drain_deadline,
        has_secret=bool(held.secret),
    )


def decode_secret(member: bytes) -> str:
    return _member.decode(member).secret


def decode_change(entry_id: bytes, fields: Mapping[bytes, Any]) -> Change:
    return Change(
        id=id_of(entry_id),
        cause=ChangeCause(fields[b"cause"].decode()),
        instance=decode_instance(fields[b"instance"], fields[b"member"], fields[b"spec"]),
    )


def id_of(entry_id: bytes) -> int:
    """Returns the id of a record from that of its stream entry, `ID-0`."""
    return int(entry_id.partition(b"-")[0])


def finite(raw: bytes) -> float:
    """Returns a number of seconds. Raises ValueError if it is not finite."""
    number = float(raw)
    _require_finite(number)
    return number


def _require_finite(*numbers: float | None) -> None:
    for number in numbers:
        if number is not None and not math.isfinite(number):
            raise ValueError(f"a number is {number}")
