"""The data that the registry reads from Redis: all records, the log, the answers of its scripts.

The registry must accept each record or refuse it with a named error. An accepted record can be
listed and paired.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from kvxfer.errors import ControlPlaneError, ControlPlaneUnavailable, KvxferError
from kvxfer.instances import ChangeCause, InstanceSpec, InstanceState, Load, Role, Traffic
from kvxfer.layout import KvLayout
from kvxfer.prefix_hashes import HASH_BYTES
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import records
from kvxfer.scheduler.redis_registry.answers import accepted, lease
from kvxfer.scheduler.redis_registry.mirror import LogBroken, Mirror
from kvxfer.scheduler.redis_registry.snapshot import Blocks, load, load_blocks
from kvxfer.scheduler.room import Room
from kvxfer.scheduler.scaling.redis_leader import _token
from kvxfer.transfers import Party, Transfer, TransferRequest
from kvxfer.weight_updates import UpdateState
from verify.fuzz.python.choices import Choices

DECODERS = {
    "scheduler/redis_registry/records.py": None,
    "scheduler/redis_registry/answers.py": None,
    "scheduler/redis_registry/snapshot.py": ["load", "load_blocks", "_text"],
    "scheduler/redis_registry/mirror.py": ["Mirror.apply", "Mirror._*", "Mirror.instance"],
    "scheduler/scaling/redis_leader.py": ["_token"],
}

_NAMES = ("p", "d", "x")
_SPEC = InstanceSpec(
    instance_id="p",
    role=Role.PREFILL,
    model="m",
    engine_address="kvx://h:1/0",
    http_address="http://h:1",
    layout=KvLayout(num_layers=2, num_kv_heads=2, head_size=4, dtype="float16", block_size=4),
    num_blocks=8,
)
_REFUSALS = (
    "ok",
    "held",
    "stale",
    "not-ready",
    "too-few-blocks",
    "unknown-instance",
    "table-exists",
    "unknown-transfer",
    "wrong-secret",
    "leaving",
)
_MEMBER: dict[str, Any] = {
    "epoch": 7,
    "state": "ready",
    "role": "prefill",
    "registered_at": 1.0,
    "heartbeat_at": 2.0,
    "reserved": {"transfers": 0, "blocks": 0},
    "load": {"running": 1, "ttft_p90": 0.5, "free_blocks": 8},
}


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def run(data: bytes) -> None:
    choices = Choices(data)
    (_mirror, _values, _answer)[choices.below(3)](choices)


def _values(choices: Choices) -> None:
    """Checks that a record is read as it was written."""
    decode, encode = choices.one_of(_VALUES)
    try:
        with records.reading("a value"):
            value = decode(choices.rest())
    except ControlPlaneUnavailable:
        return
    if isinstance(value, Load):
        value = replace(value, sent=())  # a load's traffic is written beside it
    assert repr(decode(encode(value))) == repr(value)  # a NaN is not equal to itself


def _encode_sent(sent: tuple[Traffic, ...]) -> bytes:
    return records.encode_sent(Load(sent=sent)) or msgspec.msgpack.encode(())


def _encode_secret(secret: str) -> bytes:
    return msgspec.msgpack.encode({**_MEMBER, "secret": secret})


_VALUES: tuple[tuple[Callable[[bytes], Any], Callable[[Any], bytes]], ...] = (
    (records.decode_transfer, records.encode_transfer),
    (records.decode_load, records.encode_load),
    (records.decode_table, records.encode_table),
    (records.decode_update, records.encode_update),
    (records.decode_sent, _encode_sent),
    (records.decode_secret, _encode_secret),
)


def _answer(choices: Choices) -> None:
    answer: Any = [choices.one_of(_REFUSALS).encode()]
    while choices and len(answer) < 8:
        answer.append(choices.one_of(_PARTS)(choices))
    kind = choices.byte()
    if kind == 0xFF:
        answer = answer[1:] or None
    with suppress(ControlPlaneError):
        rest = accepted("register", answer, ("p", "", "", "8", "http://h:1"))
        lease("p", LeasePolicy(10), rest)
    with suppress(ControlPlaneUnavailable):
        _token(choices.rest(), "kvxfer:{scaling}:token")


_PARTS: tuple[Callable[[Choices], object], ...] = (
    lambda c: str(c.integer()).encode(),
    lambda c: c.one_of((b"ready", b"prefill", b"both", b"7", b"")),
    lambda c: c.bytes(),
    lambda c: c.one_of((None, 7, [b"7"])),
)


def _mirror(choices: Choices) -> None:
    _loop().run_until_complete(_follow(choices))


async def _follow(choices: Choices) -> None:
    mirror = Mirror(feed_capacity=4, scorer=None, room=Room())
    await _load(mirror, choices)
    while choices:
        kind = choices.byte()
        if kind == 0xFF:
            mirror.open(_transfer_of(choices))
        elif kind == 0xFE:
            mirror.undo(choices.one_of(_NAMES))
        else:
            try:
                mirror.apply(*_record(choices, mirror.position, kind))
            except (LogBroken, ControlPlaneUnavailable):
                _look(mirror)
                await _load(mirror, choices)
        _look(mirror)


async def _load(mirror: Mirror, choices: Choices) -> None:
    with suppress(ControlPlaneUnavailable):
        everything, blocks = _everything(choices)
        await load(mirror, everything)
        await load_blocks(mirror, Blocks(mirror.position, blocks))


def _look(mirror: Mirror) -> None:
    """Reads the mirror as the routes do."""
    msgspec.json.encode((mirror.instances(), mirror.transfers()))
    assert mirror.open_transfers >= 0
    mirror.fleet.census()
    for name in _NAMES:
        mirror.instance(name)
    with suppress(KvxferError):
        mirror.fleet.choose(TransferRequest(prompt_tokens=8, prefix_hashes=(1, 2), explain=True))
    assert len(mirror.feed.after(0, limit=9)) <= 4


# --- the contents of Redis


def _everything(choices: Choices) -> tuple[Sequence[object], dict[str, list[bytes | None]]]:
    names = [_name(choices) for _ in range(choices.below(4))]
    members = {name: _member(choices) for name in names}
    specs = {name: _spec(choices, name) for name in names if choices.byte() != 0xFF}
    blocks: dict[str, list[bytes | None]] = {}
    for _ in range(choices.below(3)):
        name = _name(choices).decode(errors="replace")
        blocks[name] = [None for _ in records.fields_of(name)]
        blocks[name][0] = _hashes(choices, HASH_BYTES - 1)
    transfers: dict[bytes, bytes] = {}
    for _ in range(choices.below(3)):
        transfer = _transfer(choices)
        transfers[choices.one_of((b"t", b"u"))] = transfer
    changes = [_record(choices, 0, 0) for _ in range(choices.below(3))]
    position = choices.one_of((b"5", b"5", b"5", None, b"x"))
    tables = [_name(choices)]
    updates = {choices.one_of((b"t", b"u")): _update(choices) for _ in range(choices.below(3))}
    return (position, b"0", members, specs, transfers, updates, tables, changes), blocks


def _record(choices: Choices, after: int, kind: int) -> tuple[bytes, dict[bytes, bytes]]:
    name = _name(choices)
    told = choices.one_of((b"t", b"u"))  # a transfer or an update
    fields: dict[bytes, bytes]
    match kind % 10:
        case 0:
            cause = choices.one_of(tuple(ChangeCause))
            fields = {
                b"kind": b"change",
                b"cause": cause.encode(),
                b"instance": name,
                b"member": _member(choices),
                b"spec": _spec(choices, name),
            }
        case 1:
            load_of = choices.one_of((b"", msgspec.msgpack.encode({"running": 3}), choices.bytes()))
            seconds = choices.one_of((b"7.5", b"7.5", b"nan", b"x"))
            fields = {
                b"kind": b"beat",
                b"instance": name,
                b"heartbeat_at": seconds,
                b"load": load_of,
            }
        case 2:
            fields = {
                b"kind": b"blocks",
                b"instance": name,
                b"come": _hashes(choices),
                b"go": _hashes(choices),
                b"anew": choices.one_of((b"", b"1")),
            }
        case 3:
            fields = {b"kind": b"open", b"transfer": _transfer(choices)}
        case 4:
            fields = {b"kind": b"table", b"transfer": told}
        case 5:
            reason = choices.one_of((b"released", b"expired"))
            fields = {b"kind": b"end", b"transfer": told, b"reason": reason}
        case 6:
            fields = {b"kind": b"update", b"update": _update(choices)}
        case 7:
            fields = {b"kind": b"no-update", b"update": told}
        case 8:
            fields = {b"kind": b"spared", b"leases": choices.one_of((b"12", b"x"))}
        case _:
            fields = {b"kind": choices.bytes()}
    fields[b"after"] = str(after).encode() if choices.byte() != 0xFF else choices.bytes()
    if choices.byte() == 0xFF:
        del fields[choices.one_of(sorted(fields))]
    entry_id = f"{after + 1}-0".encode() if choices.byte() != 0xFF else choices.bytes()
    return entry_id, fields


def _name(choices: Choices) -> bytes:
    return choices.bytes() if choices.byte() == 0xFF else choices.one_of(_NAMES).encode()


def _hashes(choices: Choices, size: int = HASH_BYTES) -> bytes:
    if choices.byte() == 0xFF:
        return choices.bytes()
    return b"".join(choices.below(4).to_bytes(size, "big") for _ in range(choices.below(4)))


def _member(choices: Choices) -> bytes:
    held = {
        **_MEMBER,
        "epoch": choices.one_of((7, 8)),
        "state": choices.one_of(tuple(InstanceState)),
        "role": choices.one_of(tuple(Role)),
    }
    return _packed(choices, held, msgspec.msgpack.encode)


def _spec(choices: Choices, name: bytes) -> bytes:
    labels = {"host": choices.one_of(("a", "b"))}
    spec = replace(_SPEC, instance_id=name.decode(errors="replace"), labels=labels)
    written = msgspec.json.decode(records.encode_spec(spec))
    return _packed(choices, written, msgspec.json.encode)


def _transfer(choices: Choices) -> bytes:
    transfer = msgspec.to_builtins(_transfer_of(choices))
    return _packed(choices, transfer, msgspec.msgpack.encode)


def _update(choices: Choices) -> bytes:
    update = {
        "update_id": choices.one_of(("t", "u")),
        "model": "m",
        "version": 1 + choices.below(3),
        "policy": "drain",
        "state": choices.one_of(tuple(UpdateState)),
        "started_at": 1.0,
        "ended_at": choices.one_of((None, 2.0)),
        "lease_seconds": 15.0,
        "instances": [{"instance_id": "p", "epoch": 7}],
    }
    return _packed(choices, update, msgspec.msgpack.encode)


def _transfer_of(choices: Choices) -> Transfer:
    def party() -> Party:
        return Party(
            instance_id=choices.one_of(_NAMES),
            epoch=choices.one_of((7, 8)),
            engine_address="kvx://h:1/0",
            http_address="http://h:1",
        )

    return Transfer(
        transfer_id=choices.one_of(("t", "u", *_NAMES)),
        request_id="r",
        model="m",
        prompt_tokens=8,
        prefill=party(),
        decode=party(),
        prefill_blocks=2,
        decode_blocks=2,
        created_at=1.0,
        expires_at=2.0,
    )


def _packed(choices: Choices, value: dict[str, Any], encode: Callable[[object], bytes]) -> bytes:
    """Returns a record as it was written, with one changed member, or random bytes."""
    damaged = choices.byte()
    if damaged == 0xFF:
        return choices.bytes()
    if damaged == 0xFE:
        at = value
        name = choices.one_of(sorted(at))
        if isinstance(at[name], dict) and at[name] and choices.flag():
            at = at[name] = {**at[name]}
            name = choices.one_of(sorted(at))
        at[name] = choices.one_of(
            (choices.integer(), choices.number(), choices.text(), None, [], True, -1)
        )
    try:
        return encode(value)
    except OverflowError:  # no writer can encode this
        return b""
