"""Seeds of the messages between KV endpoints."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import msgspec

from kvxfer.engine import pool_wire
from kvxfer.kv.block_table import BlockTable, sign_block_table
from kvxfer.kv.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Checksum,
    Done,
    Expect,
    Hello,
    Keep,
    Message,
    Offer,
    Refused,
    Release,
    encode,
)
from kvxfer.kv_versions import NEWEST, OLDEST
from kvxfer.layout import KvLayout, LayerShape
from kvxfer.model_identity import ModelIdentity
from kvxfer.ticket import Ticket, TicketKeys, sign_ticket

_OTHER_KEY: Final = b"another key that no one here has."

_ODD_LAYOUTS: Final = (
    {"num_kv_heads": 2},
    {"kv": "opaque", "order": "HND"},
    {"kv": "opaque", "order": "HND", "packing": "vec"},
    {"kv": "state", "order": "HND", "packing": "GDN_ATTN SD float32", "sections": (6, 10)},
    {"block_size": 65535},
    {"layer_groups": (0, 1, 0, 1)},
    {"order": "HND", "tp_size": 2, "block_size": 8},
    {"layer_groups": (0, 1, 0, 1), "block_size": 8},
    {"shapes": (LayerShape(1, 8, "int8"),), "layer_shapes": (0, 1, 0, 1)},
)
_SMALL_LAYOUT: Final = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_size": 16,
    "dtype": "int8",
    "block_size": 16,
}
_SHAPE: Final = {"num_kv_heads": 1, "head_size": 8, "dtype": "int8"}
_OF_TWO_SHAPES: Final = {"shapes": [_SHAPE], "layer_shapes": [0, 1]}
_WRONG_LAYOUTS: Final[tuple[dict[str, object], ...]] = (
    {"dtype": "?"},
    {"mla": True},
    {"kv": "opaque"},
    {"packing": "amx"},
    {"packing": "amx", "kv": "opaque", "order": "HND", "block_size": 8},
    {"sections": [1]},
    {"layer_groups": [1, 1]},
    {"layer_groups": [0, 2**31 - 1]},
    {"layer_shapes": [0]},
    {**_OF_TWO_SHAPES, "layer_shapes": [0, 0]},
    {**_OF_TWO_SHAPES, "shapes": [{**_SHAPE, "block_size": 24}]},
    {**_OF_TWO_SHAPES, "shapes": [{**_SHAPE, "block_size": 32}]},
    {"tp_rank": 1},
    {"tp_size": 3},
    {"pp_size": 3},
)
_FP8: Final = "float8_e4m3fn"
_WRONG_STEPS: Final = (
    {"experts": 1 << 17},
    {"top_k": 5},
    {"combine": _FP8},
    {"input": _FP8, "wire": "bfloat16"},
    {"scale_block": 512},
    {"scale_block": 128},
    {"wire": _FP8},
)


def messages() -> Iterator[bytes]:
    layouts = [
        KvLayout(num_layers=4, num_kv_heads=4, head_size=16, dtype="float16", block_size=16),
        KvLayout(
            num_layers=4,
            num_kv_heads=4,
            head_size=16,
            dtype="float16",
            block_size=32,
            tp_size=2,
            order="HND",
            kv="opaque",
            packing="amx",
            layer_groups=(0, 1, 0, 1),
        ),
        KvLayout(4, 1, 16, "float16", 16, mla=True, pp_size=2, pp_rank=1),
    ]
    said: list[Message] = [
        Hello(OLDEST, "p", 7, layout, 32, ((8192, 8192),) * 4, True) for layout in layouts
    ]
    said += [
        Hello(
            *(OLDEST, "p", 7, layouts[0], 32, ((8192, 8192),) * 4, True),
            newest=NEWEST,
            model=ModelIdentity(checkpoint="5b0c2e9d", weights_version=2**63 - 1, rope="{}"),
        ),
        Offer("t", "a.b.c", b"\x01\0\0\0", (b"descriptor",) * 2, 2**32 - 1, 1.5, 3),
        Offer("t", "a.b.c", b"\x01\0\0\0", (b"descriptor",) * 2, 1, 1.5, 3, adapter="5b0c2e9d"),
        Release("t", "a.b.c", "cached"),
        Keep("t", "a.b.c", 1.5),
        Expect("t", "a.b.c"),
        Accepted("t"),
        Refused("t", "ticket-expired", "too late"),
        Done("t", 7, b"tail"),
        Done("t", 7, b"tail", Checksum(2**64 - 1, 2)),
        Cancel("t", "gone"),
        Cancelled("t", 0),
    ]
    for message in said:
        yield b"\x00" + encode(message)
    good = said[0]
    assert isinstance(good, Hello)
    for change in (
        {"num_blocks": 0},
        {"block_strides": ((1, 1),) * 4},
        {"block_strides": ()},
        {"version": 1},
        *({"layout": replace(good.layout, **field)} for field in _ODD_LAYOUTS),
    ):
        strides = good.block_strides
        if (layout := change.get("layout")) is not None:
            strides = ((1 << 24,) * len(layout.parts),) * layout.layers_per_rank
        hello = msgspec.structs.replace(good, **{"block_strides": strides, **change})
        yield b"\x00" + encode(hello)
    # Fields that a writer of this version cannot make.
    fields = msgspec.msgpack.decode(encode(good))
    for more in _WRONG_LAYOUTS:
        yield b"\x00" + _packed({**fields, "layout": {**_SMALL_LAYOUT, **more}})
    yield b"\x01" + pool_wire.encode(
        pool_wire.PoolOffer(b"region", 4096, (pool_wire.SlotOffer(0, 1, 2),) * 3)
    )
    for table in (b"", b"\x01\0\0\0", b"\x01\0\0\0" * 2, b"\xff" * 4, b"\x09\0\0\0"):
        yield b"\x02\x00\x08" + table
        yield b"\x02\x01\x08" + table * 2
    yield b"\x02\x01\x08" + b"\xff\xff\xff\xff\x01\0\0\0"
    yield b"\x03" + struct.pack("<QII", 1, 2, 3)
    for tail in (
        b"\x01m\x01\x01\x07",
        b"\x01x\x01\x01\x07",
        b"\x01m\x01\x01\x08",
        b"\x00\x00\x00\x91\x01",
    ):
        yield b"\x04" + tail
    yield from _messages_of_weights()
    yield from _messages_of_moe()


def _messages_of_weights() -> Iterator[bytes]:
    """Yields messages of weight updates: valid, damaged, and as wrong fragments."""
    for number in range(7):
        yield bytes((0xFF, 0, number))
        yield bytes((0xFF, 0, number, 2, 40, 0xC0, 60, 0xFF))
    fragment = {"type": "fragment", "at": 0, "of": 1, "data": b""}
    for change in (
        {"data": _packed({"type": "compressed", "data": b"no zlib"})},
        {"data": _packed(fragment)},
        {"at": 1, "of": 2},
    ):
        yield b"\xff\x01" + _packed({**fragment, **change})


def _messages_of_moe() -> Iterator[bytes]:
    """Yields messages of MoE groups: valid, damaged, and of impossible groups."""
    for number in range(8):
        yield bytes((0xFD, 0, number))
        yield bytes((0xFD, 0, number, 2, 40, 0xC0, 60, 0xFF))
    yield b"\xfd\x01" + _packed({"type": "terms", "remote": 1})
    shape: dict[str, object] = {"experts": 4, "hidden": 256, "top_k": 2, "max_tokens": 8}
    hello = {
        "type": "hello",
        "rank": 0,
        "shape": shape,
        "placement": {"ranks": [[0, 1], [2, 3]]},
        "address": "kvx://",
        "socket": "",
        "secret": bytes(16),
    }
    yield b"\xfd\x01" + _packed(hello)
    for wrong in _WRONG_STEPS:
        yield b"\xfd\x01" + _packed({**hello, "shape": {**shape, **wrong}})
    for ranks in ([], [[0, 0]], [[1]], [[]]):
        yield b"\xfd\x01" + _packed({**hello, "placement": {"ranks": ranks}})


def _packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def endpoint() -> Iterator[bytes]:
    # The first bytes choose whether HELLO, a prefill and a decode session come first. Then 0 and a
    # kind stand for a message of the peer, and 0xff for a write of the peer.
    hello = bytes(8)
    greeted = b"\x01" + hello
    to_peer, from_peer, early, bearer, foreign = (bytes([name]) for name in range(5))

    def say(kind: int, *fields: bytes) -> bytes:
        return bytes([0, kind]) + b"".join(fields)

    def offer(
        name: bytes,
        imm: bytes = b"\x07",
        lease: bytes = b"\x80",
        grants: bytes = b"\x00",
        first: bytes = b"\x00",
    ) -> bytes:
        blocks = b"\x00\x01\x02"
        return say(1, name, blocks, b"\x00\x01\x00", grants, imm, lease, first)

    accepted, arrive = say(5, from_peer), b"\xff"

    def done(total: bytes, checksum: bytes = b"\x00") -> bytes:
        return say(7, from_peer, total, b"\x04tail", checksum)

    cancel, refused = say(8, from_peer, b"\x03why"), say(6, from_peer)
    prefill, decode = greeted + b"\x01\x00", greeted + b"\x00\x01"
    yield prefill + offer(to_peer) + offer(to_peer) + say(8, to_peer, b"\x00")
    yield prefill + offer(to_peer, lease=b"\x08") + offer(to_peer, imm=b"\xe8")
    yield prefill + offer(to_peer, imm=b"\xe8")
    yield prefill + say(3, to_peer, to_peer, b"\x30") + say(3, to_peer, to_peer, b"\x08")
    yield prefill + say(2, to_peer, to_peer, b"\x00") + offer(to_peer)
    yield prefill + say(3, to_peer, early, b"\x30") + say(2, to_peer, foreign, b"\x00")
    yield greeted + b"\x00\x00" + offer(early) + offer(bearer) + say(8, early, b"\x00")
    yield greeted + b"\x00\x00" + offer(early) + offer(foreign) + say(9, early, b"\x00")
    yield decode + accepted + done(b"\x02") + arrive + arrive
    yield decode + accepted + arrive + arrive + done(b"\x01")
    yield decode + accepted + arrive + done(b"\x01")
    yield decode + accepted + done(b"\x01") + arrive + done(b"\x01")
    for total in (b"\x00", b"\xe2", b"\xe3", b"\xe8"):
        yield decode + accepted + done(total)
    for code in range(3):
        yield decode + refused + bytes([code])
    yield decode + accepted + cancel + done(b"\x00")
    yield decode + done(b"\x01")
    checked = b"\x01" + bytes(7) + b"\x01" + b"\x00\x01"
    for checksum in (b"\x00", b"\x01\x07\x02", b"\x01\x07\x05", b"\x01\xe8\xe8"):
        yield checked + accepted + arrive + done(b"\x01", checksum)
    yield decode + accepted + say(9, from_peer, b"\x00")
    yield decode + accepted + b"\xfe"
    yield prefill + offer(to_peer, grants=b"\x03")
    yield prefill + offer(to_peer, first=b"\xff\xe2")
    yield prefill + offer(to_peer, first=b"\xff\x05")
    yield prefill + offer(to_peer, first=b"\xff\xe6")
    yield prefill + offer(to_peer, imm=b"\xe9")
    yield prefill + offer(to_peer) + b"\xfe"
    yield greeted + b"\x00\x00" + say(4, from_peer, from_peer) + cancel + say(4, early, early)
    yield greeted + b"\x00\x00" + accepted + refused + b"\x00" + done(b"\x01")
    yield b"\x00\x01\x01" + offer(to_peer)
    yield b"\x00\x00\x00" + say(10, b"\x05junk!")
    yield greeted + b"\x00\x00" + say(0, b"\x01\x01\x01\x01\x00\x01\x01", hello[1:])
    yield greeted + b"\x00\x00" + say(0, b"\x00\x00\x00\x03\x00\x00\x00")
    planes_that_overlap = b"\0\xff\x07\x02\x02"
    for wrong in (
        b"\0\0\xff\x05",
        b"\0\0\0\0\0\xff\0",
        b"\0\xff\x07\x01\x02",
        planes_that_overlap,
    ):
        yield b"\x00\x00\x00" + say(0, wrong)


def tickets() -> Iterator[bytes]:
    names = b"\x01t\x01r\x01p\x01\x01d\x01"
    for expires in (b"\x10", b"\xff"):
        yield b"\x01" + names + expires + b"\x02xy" + b"\x05\x01"
        for chosen in (b"\x00\x00", b"\x01\x01\x01", b"\x00\x01\x01z"):
            signed = b"\x01\x00\x04\x01\0\0\0\x03mrd\x07\x20\x00"
            yield b"\x03" + names + expires + b"\x00" + signed + chosen
    yield b"\x03" + names + b"\xff\x00" + b"\x01\x00\x00\x00\xea\x20\x00\x00\x00"
    yield b"\x03" + names + b"\xff\x00" + b"\x01\x01\x01u\x00\x00\x07\x20\x00\x00\x00"
    yield b"\x00eyJhbGciOiJIUzI1NiIsImtpZCI6ImEifQ.e30.AAAA"
    yield b"\x00" + b"a" * 5000
    claims = {"iss": "kvxfer", "jti": "t", "request_id": "r", "exp": 2e6}
    sides = {"prefill": {"id": "p", "epoch": 1}, "decode": {"id": "d", "epoch": 1}}
    yield b"\x02\x00" + json.dumps({**claims, **sides, "prompt": "AAAA"}).encode()
    for wrong in ({"nbf": []}, {"nbf": 1e999}, {"iat": None}, {"exp": 10**400}, {"jti": 7}):
        yield b"\x02\x00" + json.dumps({**claims, **sides, **wrong}).encode()
    yield b"\x02\x00" + b"[" * 2000
    offer = {
        "type": "offer",
        "transfer_id": "t",
        "ticket": "a.b.c",
        "blocks": "AAAA",
        "grants": ["AAAA"],
        "imm": 2**70,
        "lease_seconds": 1,
    }
    table = {
        "offer": offer,
        "decode_id": "d",
        "decode_epoch": 1,
        "kid": "a",
        "mac": "AAAA",
    }
    yield b"\x04" + json.dumps(table).encode()
    yield b"\x05\x01p\x01\x03kvx\x01m\x01b\x10\x40"
    yield b"\x06\x01\x01t\x01r\x01p\x01\x01d\x01\x00\x06\x00"
    yield b"\x03" + names + b"\xff\x00" + signed + b"\x01\x07\x00"
    known = TicketKeys([b"0123456789abcdef0123456789abcdef"]).signing_id
    yield b"\x04" + json.dumps({**table, "offer": {**offer, "imm": 7}, "kid": known}).encode()


def table_of(transfer_id: str) -> BlockTable:
    """Returns a block table under an untrusted key."""
    ticket = Ticket(transfer_id, "r", "p", 1, "d", 2, 2e9)
    token = sign_ticket(ticket, _OTHER_KEY)
    offer = Offer(transfer_id, token, b"\x03\0\0\0", (b"descriptor",), 7, 1.5)
    return sign_block_table(offer, ticket, _OTHER_KEY)


def brokered() -> Iterator[bytes]:
    body = json.loads(msgspec.json.encode(table_of("t")))
    offer = body["offer"]
    wrong: tuple[dict[str, object], ...] = (
        {},
        {"mac": "no base64"},
        {"decode_epoch": 1 << 70},
        {"offer": {**offer, "imm": -1}},
        {"offer": {**offer, "lease_seconds": 1e999}},
        {"offer": {**offer, "grants": ["="]}},
    )
    for change in wrong:
        yield b"\x00" + json.dumps({**body, **change}).encode()

    # The first bytes choose whether there is a control plane, and whether HELLO, a prefill and a
    # decode session come first. Then 0 and a kind stand for a message of the peer, and 1 for an
    # answer of the control plane.
    greeted = b"\x01\x00\x01" + bytes(8)
    prefill, decode = greeted + b"\x01\x00", greeted + b"\x00\x01\x00"
    to_peer, from_peer, early = b"\x00", b"\x01", b"\x02"
    unchanged, as_it_is = b"\x00\x00", b"\xff"

    def table(
        imm: bytes = b"\x07",
        damaged: bytes = unchanged,
        name: bytes = to_peer,
        ticket: bytes = b"\x01",
    ) -> bytes:
        blocks = b"\x00\x00\x01"
        offered = name + blocks + b"\x00" + ticket + b"\x00\x00" + imm + b"\x80\x00"
        return b"\x01\x00" + offered + damaged

    def problem(code: int, status: int) -> bytes:
        return b"\x01\x01" + bytes([code, 1]) + b"x" + bytes([status])

    expect = b"\x00\x04" + from_peer + from_peer
    cancel = b"\x00\x08" + from_peer + b"\x03why"
    hang_up, created = b"\x01\x03", b"\x01\x02\x01\x00"
    yield prefill + table()
    yield prefill + problem(0, 0) + table()
    yield prefill + table(damaged=b"\x00\xff\x02xy")
    yield prefill + table(damaged=b"\x00\xfe\x02xy")
    yield prefill + table(damaged=b"\x00\xfd\x09")
    yield prefill + table(imm=b"\xe8")
    yield prefill + table(name=early, damaged=as_it_is + b"\x00")
    yield prefill + table(name=early, ticket=b"\x00" + to_peer, damaged=as_it_is + b"\x00")
    yield prefill + table(ticket=b"\x00\x05", damaged=as_it_is + b"\x00")
    yield greeted + b"\x00\x02\x00\x00" + expect
    yield greeted + b"\x00\x02\xff\x00" + expect
    yield greeted + b"\x00\x00" + expect + b"\xfd\x01" + expect
    yield greeted + b"\x00\x01\xff"
    yield greeted + b"\x00\x00" + expect + cancel + b"\xfd\x00"
    yield greeted + b"\x00\x00" + expect + b"\xff\xfd\x00"
    yield greeted + b"\x00\x00" + b"\x00\x01" + table()[2:-2] + b"\xfc"
    for code in range(7):
        yield prefill + problem(code, code % 6)
        yield decode + expect + problem(code, code % 6)
    yield prefill + hang_up + b"\x01\x02\x00\x02{}"
    yield prefill + b"\x00\x01" + table()[2:]
    yield decode + expect + created + cancel
    yield decode + cancel + expect + cancel + expect
    yield decode + expect + hang_up + created + b"\xff"
    yield greeted + b"\x00\x01\xff" + expect + cancel
    yield greeted + b"\x00\x00" + expect + cancel + expect
    yield b"\x01\xff\x01" + bytes(8) + b"\x01\x01\x00"
    yield b"\x01\x00\x00\x01\x00\xff" + expect
