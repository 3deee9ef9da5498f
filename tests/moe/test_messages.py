from __future__ import annotations

import msgspec
import pytest

from kvxfer.errors import ProtocolError
from kvxfer.moe.messages import Hello, Members, Message, Terms, decode, encode
from kvxfer.moe.placement import Placement
from kvxfer.moe.shape import MoeShape
from kvxfer.moe.view_messages import MOST_WHY, Flush, Refusal, View

HELLO = Hello(
    1,
    MoeShape(experts=4, hidden=8, top_k=2, max_tokens=8),
    Placement.even(4, 2),
    "kvx://127.0.0.1:1/0",
    "socket",
    bytes(16),
)


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        Terms(None),
        Members({1: "kvx://"}),
        Members({}, taken=True),
        Flush(0, 7, (), refuses="why"),
        View(3, 0, (0, 1), (), 7, (Refusal(7, 1, "why"),)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_message_reads_as_written(message: Message) -> None:
    assert decode(encode(message), "peer") == message


def hello(**changes: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(HELLO)), **changes})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        encode(HELLO)[:-1],
        msgspec.msgpack.encode({"type": "bribe"}),
        msgspec.msgpack.encode({"type": "join", "rank": -1}),
        msgspec.msgpack.encode({"type": "members", "addresses": {-1: "kvx://"}}),
        msgspec.msgpack.encode(
            {
                "type": "flush",
                "view": 0,
                "next_step": 0,
                "lost": [],
                "refuses": "x" * (MOST_WHY + 1),
            }
        ),
        hello(secret=b"short"),
        hello(shape={"experts": 4, "hidden": 8, "top_k": 5, "max_tokens": 8}),
        hello(placement={"ranks": [[0, 2]]}),
    ],
)
def test_the_error_for_an_invalid_message_names_its_sender(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="'stranger' sent a message that cannot be read"):
        decode(data, "stranger")
