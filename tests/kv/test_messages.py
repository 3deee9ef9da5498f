from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ProtocolError
from kvxfer.kv.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Checksum,
    Done,
    Hello,
    Keep,
    Message,
    Offer,
    Refused,
    decode,
    encode,
)
from kvxfer.layout import KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_size=8, dtype="float32", block_size=4)
HELLO = Hello(
    version=1,
    instance_id="prefill-0",
    epoch=7,
    layout=LAYOUT,
    num_blocks=32,
    block_strides=((256, 256), (256, 320)),
    permutes=True,
)
MESSAGES: list[Message] = [
    HELLO,
    Offer(
        transfer_id="t",
        ticket="a.b.c",
        blocks=b"\x01\0\0\0",
        grants=(b"\x00descriptor\xff",) * 4,
        imm=2**32 - 1,
        lease_seconds=1.5,
    ),
    Keep(transfer_id="t", ticket="a.b.c", lease_seconds=1.5),
    Accepted(transfer_id="t"),
    Refused(transfer_id="t", code="ticket-expired", reason="too late"),
    Done(transfer_id="t", total=128, tail=bytes(range(256))),
    Done(transfer_id="t", total=1, tail=b"", checksum=Checksum(value=2**64 - 1, blocks=7)),
    Cancel(transfer_id="t", reason="the user left"),
    Cancelled(transfer_id="t", total=3),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    received = decode(encode(message))
    assert received == message
    assert type(received) is type(message)


def test_messages_are_frozen() -> None:
    done: Any = decode(encode(MESSAGES[4]))
    with pytest.raises(AttributeError):
        done.total = 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({"type": "unheard-of"}),
        msgspec.msgpack.encode({"transfer_id": "t"}),
        msgspec.msgpack.encode({"type": "accepted"}),
        msgspec.msgpack.encode({"type": "accepted", "transfer_id": 7}),
        msgspec.msgpack.encode({"type": "done", "transfer_id": "t", "total": "1", "tail": b""}),
        b"\x82\xa4type\xa8accepted\xabtransfer_id\xa2\xff\xfe",
        encode(MESSAGES[1])[:-1],
        encode(MESSAGES[1]) + b"\0",
        b"\x91" * 100_000,
    ],
)
def test_data_that_is_not_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not of the KV protocol"):
        decode(data)


def test_a_hello_with_an_impossible_layout_is_refused() -> None:
    fields: dict[str, Any] = msgspec.to_builtins(HELLO)
    fields["layout"]["dtype"] = "float12"
    with pytest.raises(ProtocolError, match="float12"):
        decode(msgspec.msgpack.encode(fields))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data)


def test_damaged_messages_never_raise_anything_else(rng: random.Random) -> None:
    for _ in range(2000):
        data = bytearray(encode(rng.choice(MESSAGES)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(ProtocolError):
            decode(bytes(data))
