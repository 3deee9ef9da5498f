"""Seeds of the data in Redis. The numbers are the choices of the target, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvxfer.instances import Load, Traffic
from kvxfer.transfers import Party, Transfer
from kvxfer.weight_updates import UpdatePolicy, UpdateState, WeightUpdate
from verify.fuzz.seeds.kv import table_of

_P: Final = b"\0\0"
_D: Final = b"\0\1"
_X: Final = b"\0\2"
_RIGHT: Final = b"\0\0\0"


def redis_records() -> Iterator[bytes]:
    yield from _values()
    yield from _logs()
    yield from _answers()


def _values() -> Iterator[bytes]:
    """Yields records, each after the number of its kind."""
    party = Party(instance_id="p", epoch=1, engine_address="kvx://h:1/0", http_address="")
    transfer = Transfer(
        transfer_id="t",
        request_id="r",
        model="m",
        prompt_tokens=None,
        prefill=party,
        decode=party,
        prefill_blocks=1,
        decode_blocks=1,
        created_at=1.0,
        expires_at=2.0,
    )
    update = WeightUpdate(
        update_id="t",
        model="m",
        version=1,
        policy=UpdatePolicy.DRAIN,
        state=UpdateState.STAGING,
        started_at=1.0,
        lease_seconds=15.0,
        instances=(),
    )
    loads = (Load(running=1, ttft_p90=0.5), Load(itl_p90=float("inf")))
    sent = (Traffic(to="d", fabric="tcp", bytes_per_second=1e9),)
    member = {"epoch": 7, "state": "ready", "role": "prefill", "reserved": {}, "secret": "s"}
    # Loads of a version that does not count the bytes that a worker sends.
    older = [msgspec.structs.asdict(load) for load in loads]
    for fields in older:
        del fields["sent"]
    replace = msgspec.structs.replace
    written: tuple[tuple[object, ...], ...] = (
        (
            transfer,
            replace(transfer, prefill_blocks=-1),
            replace(transfer, expires_at=float("nan")),
        ),
        (*loads, replace(loads[0], sent=sent), *older),
        (table_of("t"),),
        (update, replace(update, ended_at=float("nan"))),
        (sent, ()),
        ({**member, "registered_at": 1.0, "heartbeat_at": 2.0}, member),
    )
    for kind, values in enumerate(written):
        yield b"\1" + bytes([kind])
        for value in values:
            yield b"\1" + bytes([kind]) + msgspec.msgpack.encode(value)


def _logs() -> Iterator[bytes]:
    """Yields contents of Redis with p, d, p's blocks, a transfer, a change and an update, and the
    records of the log that follow them."""
    whole = b"\0\2" + _P + _D + _member() + _member(role=1) + _spec() * 2
    whole += b"\1" + _P + b"\0\2\1\2" + b"\1" + _transfer() + b"\0"
    whole += b"\1" + _P + b"\0" + _change() + _RIGHT + b"\0" + _P + b"\1\0" + _update()
    blocks, opened = _record(2), _record(3)
    applied = [
        _record(0) + _change(),
        _record(0, _X) + _change(),
        _record(1) + b"\0\1\0",  # a heartbeat with a load
        _record(1) + b"\0\0\0",
        blocks + b"\0\1\3" + b"\0\1\2" + b"\0",
        blocks + b"\0\2\3\3" + b"\0\0" + b"\0",
        opened + _transfer(name=1),
        _record(4),  # a block table
        _record(5) + b"\0",  # the end of a transfer
        _record(6) + _update(name=1),
        _record(7),  # no longer an update
        _record(8) + b"\0",  # spared leases
        _record(0) + _change(state=3),
    ]
    refused = [
        _record(0) + _change()[:-1] + b"\xfe\6\0\0\1x\2",  # another name
        _record(1) + b"\0\1\2",  # a time that is no number
        _record(1, _X) + b"\0\1\0",
        blocks + b"\xff\1x" + b"\0\0" + b"\0",  # a part of a hash
        opened + _transfer(damaged=b"\xfe\4\0\0\0\6"),  # -1 blocks
        _record(9) + b"\1x",
    ]
    for record in (*applied, *refused):
        yield whole + record + _RIGHT
        yield whole + record + b"\xff\1" + b"9" + b"\0\0"  # it does not follow the last one
        yield whole + record + b"\xff\1" + b"x" + b"\0\0"
        yield whole + record + b"\0\xff\0" + b"\0"  # a field is missing
        yield whole + record + b"\0\0\xff\1x"  # the id is invalid
    yield whole + blocks + b"\0\0" * 2 + b"\0" + b"\0\xff\2" + b"\0"  # from an older version
    yield whole + b"".join(record + _RIGHT for record in applied)
    mine, undo = b"\xff" + _transfer(name=2)[:-1], b"\xfe\0"
    yield whole + mine + undo + mine + opened + _transfer(name=2) + _RIGHT
    yield whole + mine + opened + _transfer(name=2, prefill=1) + _RIGHT
    yield whole + b"\xff" + _transfer(name=1)[:-1] + _record(5, about=b"\1") + b"\0" + _RIGHT
    for at in range(2, len(whole)):
        for wrong in b"\xfe", b"\xff":
            yield whole[:at] + wrong + whole[at + 1 :]


def _answers() -> Iterator[bytes]:
    """Yields answers of scripts: the kind of answer, and its parts, each a number or a word."""
    granted = b"\2\0" + b"\0\7" + b"\1\0" + b"\1\1" + b"\0\1" + b"\0\1"
    yield granted + b"\1\4"
    yield granted + b"\0\7"
    yield granted + b"\1\4\0" + b"\0\0" + b"7"  # a token of the autoscaler's leader follows
    for refusal in range(10):
        for parts in range(5):
            yield b"\2" + bytes([refusal]) + b"\0\7" * parts
            yield b"\2" + bytes([refusal]) + b"\0\7" * parts + b"\1\4"
        yield b"\2" + bytes([refusal]) + b"\3\0"


def _record(kind: int, name: bytes = _P, about: bytes = b"\0") -> bytes:
    return bytes([kind]) + name + about


def _member(state: int = 1, role: int = 0) -> bytes:
    return bytes([0, state, role, 0])


def _spec() -> bytes:
    return b"\0\0\0"


def _change(state: int = 1) -> bytes:
    return b"\0" + _member(state) + _spec()[1:]


def _transfer(name: int = 0, prefill: int = 0, damaged: bytes = b"\0") -> bytes:
    return bytes([name, prefill, 0, 1, 0]) + damaged


def _update(name: int = 0) -> bytes:
    return bytes([name, 0, 0, 0, 0])
