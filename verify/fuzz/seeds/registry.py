"""Seeds of the data in Redis. The numbers are the choices of the target, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvxfer.instances import Load
from kvxfer.transfers import Party, Transfer
from verify.fuzz.seeds.kv import table_of


def redis_records() -> Iterator[bytes]:
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
    written = (
        transfer,
        msgspec.structs.replace(transfer, prefill_blocks=-1),
        msgspec.structs.replace(transfer, expires_at=float("nan")),
        Load(running=1, ttft_p90=0.5),
        Load(itl_p90=float("inf")),
        table_of("t"),
    )
    for value, kind in zip(written, b"\0\0\0\1\1\2", strict=True):
        yield b"\1" + bytes([kind]) + msgspec.msgpack.encode(value)
    yield b"\1\1"
    # Loads of a version that does not count the bytes that a worker sends.
    for load in (Load(running=1, ttft_p90=0.5), Load(itl_p90=float("inf"))):
        fields = msgspec.structs.asdict(load)
        del fields["sent"]
        yield b"\1\1" + msgspec.msgpack.encode(fields)

    # `whole` has p and d with blocks, a transfer and a change. Records of the log follow it.
    whole = b"\0\2" + _NAMES[0] + _NAMES[1] + _member() + _member(role=1) + _spec() * 2
    whole += b"\1" + _NAMES[0] + b"\0\2\1\2" + b"\1" + _transfer() + b"\0"
    whole += b"\1" + _NAMES[0] + b"\0\0" + _member() + _spec()[1:] + _RIGHT + b"\0" + _NAMES[0]
    records = {
        "change": b"\0" + _NAMES[0] + b"\0\0" + _member() + _spec()[1:],
        "joined": b"\1" + _NAMES[2] + b"\0\0" + _member() + _spec()[1:],
        "gone": b"\0" + _NAMES[0] + b"\0\0" + _member(state=3) + _spec()[1:],
        "beat": b"\2" + _NAMES[0] + b"\0\1\0",
        "idle": b"\2" + _NAMES[0] + b"\0\0\0",
        "nan": b"\2" + _NAMES[0] + b"\0\1\2",
        "nobody": b"\2" + _NAMES[2] + b"\0\1\0",
        "blocks": b"\3" + _NAMES[0] + b"\0" + b"\0\1\3" + b"\0\1\2" + b"\0",
        "twice": b"\3" + _NAMES[0] + b"\0" + b"\0\2\3\3" + b"\0\0" + b"\0",
        "open": b"\4" + _NAMES[0] + b"\0" + _transfer(name=1),
        "negative": b"\4" + _NAMES[0] + b"\0" + _transfer(damaged=b"\xfe\7\0\6"),
        "table": b"\5" + _NAMES[0] + b"\0",
        "end": b"\6" + _NAMES[0] + b"\0",
        "nothing": b"\7" + _NAMES[0] + b"\0\1x",
    }
    for record in records.values():
        yield whole + record + _RIGHT
        yield whole + record + b"\xff\1x" + b"\0\0"  # the record does not follow the last one
        yield whole + record + b"\0\xff\0" + b"\0"  # a field is missing
        yield whole + record + b"\0\0\xff\1x"  # the id is invalid
    yield whole + records["blocks"] + b"\0\xff\2" + b"\0"  # a record of an older version
    yield whole + b"".join(record + _RIGHT for record in records.values())
    provisional = b"\xff" + _transfer()[:-1]
    yield whole + provisional + b"\xfe\0" + provisional + records["open"] + _RIGHT
    mine = b"\xff\2" + _transfer()[1:-1]
    yield whole + mine + b"\xfe\0" + mine + records["end"] + _RIGHT
    for at in range(2, len(whole)):
        for wrong in b"\xfe", b"\xff":
            yield whole[:at] + wrong + whole[at + 1 :]

    # Answers of scripts: the kind of answer, and its parts, each a number or a word.
    yield b"\2\0" + b"\0\7" + b"\1\0" + b"\1\1" + b"\0\1\0\1\1\4\0"
    yield b"\2\0" + b"\0\7" + b"\1\0" + b"\1\1" + b"\0\1\0\1\0\7\0\0"
    for said, parts in enumerate((b"\0\7" * 7, b"\0\7" * 3, b"\0\7" * 3, b"\0\7" * 2, b"\0\7" * 3)):
        yield b"\2" + bytes([said]) + parts
        yield b"\2" + bytes([said]) + parts + b"\1\4"
    for said in (5, 6, 7):
        yield b"\2" + bytes([said])
        yield b"\2" + bytes([said]) + b"\3\0"


_NAMES: Final = (b"\0\0", b"\0\1", b"\0\2")
_RIGHT: Final = b"\0\0\0"


def _member(state: int = 1, role: int = 0) -> bytes:
    return bytes([0, state, role, 0])


def _spec() -> bytes:
    return b"\0\0\0"


def _transfer(name: int = 0, damaged: bytes = b"\0") -> bytes:
    return bytes([name, 0, 0, 1, 0]) + damaged
