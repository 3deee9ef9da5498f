"""The messages between endpoints, receive pools, members of weight updates and ranks of MoE groups,
and the block tables in these messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from kvxfer.engine import pool_wire
from kvxfer.errors import InvalidArgument, LayoutMismatch, ProtocolError
from kvxfer.kv.blocks import pack_block_table, unpack_block_table
from kvxfer.kv.connection import check_hello
from kvxfer.kv.messages import Hello, decode, encode
from kvxfer.kv.plan import plan_transfer
from kvxfer.layout import KvLayout
from kvxfer.moe import messages as moe_messages
from kvxfer.moe.placement import Placement
from kvxfer.moe.shape import MoeShape
from kvxfer.moe.view_messages import Refusal
from kvxfer.prompt_digest import prompt_digest
from kvxfer.reference.worker.tail import Tail, decode_tail, encode_tail
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.transfer import messages as weight_messages
from verify.fuzz.python.choices import Choices

DECODERS = {
    "kvxfer/kv/messages.py": ["encode", "decode", "Hello.versions"],
    "kvxfer/engine/pool_wire.py": None,
    "kvxfer/kv/blocks.py": ["unpack_block_table"],
    "kvxfer/kv/connection.py": ["check_hello"],
    "kvxfer/layout.py": ["KvLayout.__post_init__", "KvLayout._require_*"],
    "kvxfer/kv/ranks.py": ["require_mappable"],
    "kvxfer/reference/worker/tail.py": ["decode_tail"],
    "kvxfer/weights/transfer/messages.py": ["encode", "Inbox.take"],
    "kvxfer/moe/messages.py": ["encode", "decode"],
    "kvxfer/moe/placement.py": ["Placement.__post_init__"],
    "kvxfer/moe/shape.py": ["MoeShape.__post_init__", "MoeShape._require_*"],
}

OURS = KvLayout(num_layers=4, num_kv_heads=4, head_size=16, dtype="float16", block_size=16)
_OF_WEIGHTS, _OF_MOE = 0xFF, 0xFD
"""The first bytes of such inputs. Inputs for the other kinds are older and have no such byte."""
_HOLDINGS = Holdings((Holding("w", "bfloat16", (64, 8), (32, 0), (32, 8)),), {"v": "w"})
_WEIGHT_MESSAGES = (
    weight_messages.JoinTraining(0, _HOLDINGS),
    weight_messages.JoinInference("i", 0, 1, _HOLDINGS, "kvx://", True, 0),
    # A message that is long enough to be compressed.
    weight_messages.JoinTraining(0, Holdings(_HOLDINGS.parameters * 400)),
    weight_messages.Grant("1-a", 7, bytes(44)),
    weight_messages.Sent("1-a", 3, 1 << 63),
    weight_messages.Failed("1-a", weight_messages.Said("peer-lost", "it was lost")),
    weight_messages.Settled(1, UpdateReport("1-a", 1, "committed", 8)),
)
_MOE_MESSAGES = (
    moe_messages.Hello(
        1,
        MoeShape(
            experts=4, hidden=256, top_k=2, max_tokens=8, wire="float8_e4m3fn", scale_block=128
        ),
        Placement.even(4, 2, copies=2),
        "kvx://",
        "socket",
        bytes(16),
    ),
    moe_messages.Terms(b"terms"),
    moe_messages.Near(frozenset({0, 2})),
    moe_messages.Flush(1, 7, (2, 3), (3,), (4,), refuses="token 1"),
    moe_messages.View(2, 0, (0, 1, 4), (4,), 7, (Refusal(7, 1, "token 1"),)),
    moe_messages.Ask(0, 1, (0, 1)),
    moe_messages.Members({1: "kvx://"}),
    moe_messages.Members({}, taken=True),
)
_GROUPED = replace(OURS, layer_groups=(0, 1, 0, 1))


def run(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.byte()
    if kind == _OF_WEIGHTS:
        # The limit is small enough for a known message to exceed it.
        with mock.patch.object(weight_messages, "_FRAGMENT_BYTES", 256):
            _weight_update(choices)
    elif kind == _OF_MOE:
        _moe(choices)
    else:
        (_message, _pool_offer, _table, _header, _tail)[kind % 5](choices)


def _weight_update(choices: Choices) -> None:
    """Reads messages of a peer, some valid and some with changed bytes."""
    inbox = weight_messages.Inbox()
    while choices:
        messages = [choices.rest()] if choices.flag() else list(_written(choices))
        for data in messages:
            try:
                message = inbox.take(data, "peer")
            except ProtocolError:
                return
            if message is None:
                continue
            again = weight_messages.Inbox()
            for part in weight_messages.encode(message):
                read = again.take(part, "peer")
            if repr(read) != repr(message):
                raise AssertionError(f"{message} does not read as written")


def _written(choices: Choices) -> Iterator[bytes]:
    for data in weight_messages.encode(choices.one_of(_WEIGHT_MESSAGES)):
        yield _changed(data, choices)


def _changed(data: bytes, choices: Choices) -> bytes:
    changed = bytearray(data)
    for _ in range(choices.below(4)):
        changed[choices.integer() % len(changed)] = choices.byte()
    return bytes(changed)


def _moe(choices: Choices) -> None:
    """Reads a message of a rank, valid or with changed bytes."""
    data = choices.rest() if choices.flag() else None
    if data is None:
        data = _changed(moe_messages.encode(choices.one_of(_MOE_MESSAGES)), choices)
    try:
        message = moe_messages.decode(data, "peer")
    except ProtocolError:
        return
    if moe_messages.decode(moe_messages.encode(message), "peer") != message:
        raise AssertionError(f"{message} does not read as written")


def _message(choices: Choices) -> None:
    try:
        message = decode(choices.rest())
    except ProtocolError:
        return
    if repr(decode(encode(message))) != repr(message):  # a NaN is not equal to itself
        raise AssertionError(f"{message} does not read as written")
    if isinstance(message, Hello):
        with contextlib.suppress(ProtocolError, LayoutMismatch):
            check_hello(message)
            plan_transfer(_GROUPED if message.layout.layer_groups else OURS, message.layout)


def _pool_offer(choices: Choices) -> None:
    with contextlib.suppress(InvalidArgument):
        offer = pool_wire.decode(choices.rest())
        assert pool_wire.decode(pool_wire.encode(offer)) == offer


def _table(choices: Choices) -> None:
    layout = choices.one_of((OURS, _GROUPED))
    blocks = choices.integer()
    table = choices.rest()
    with contextlib.suppress(InvalidArgument):
        ids = unpack_block_table(table, blocks, layout)
        assert ids.max() < blocks
        assert ids.min() >= (-1 if layout.layer_groups else 0)
        assert pack_block_table(ids) == table


def _header(choices: Choices) -> None:
    data = choices.take(pool_wire.HEADER_BYTES).ljust(pool_wire.HEADER_BYTES, b"\0")
    header = pool_wire.Header.unpack(memoryview(data))
    again = bytearray(pool_wire.HEADER_BYTES)
    header.pack_into(memoryview(again))
    assert pool_wire.Header.unpack(memoryview(again)) == header


def _tail(choices: Choices) -> None:
    tail = Tail(choices.text(), prompt_digest([7]), choices.byte(), 0.5, 1.5)
    data = encode_tail(tail) if choices.flag() else choices.rest()
    with contextlib.suppress(ProtocolError, InvalidArgument):
        assert decode_tail(data, model="m", tokens=[choices.byte()]).model == "m"
