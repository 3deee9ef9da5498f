"""The first inputs of each corpus, from real encodings: `python -m tests.fuzz.seeds` writes them.

A fuzzer finds the way into a decoder faster from something that is right. The inputs of the C++
targets are what engine_native/fuzz reads: the numbers below are its choices, in order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from kvxfer.engine import pool_wire
from kvxfer.kv.layout import KvLayout
from kvxfer.kv.messages import (
    PROTOCOL_VERSION,
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

CORPUS: Final = Path(__file__).parent / "corpus"


def _text(value: bytes) -> bytes:
    return struct.pack("<H", len(value)) + value


def _introduction(nics: int = 1) -> bytes:
    head = _text(b"decode-0") + _text(b"boot/net:[1]") + struct.pack("<BBHQ", 1, 1, 2, 10**8)
    nic = _text(b"mlx5_0") + _text(b"roce") + struct.pack("<Q", 400 * 10**9)
    return head + struct.pack("<H", nics) + nics * nic


def _handshake() -> Iterator[bytes]:
    yield b"\x00\x01\x10" + struct.pack("<HH32s", 0, 36, b"mac") + _introduction()
    yield b"\x01\x0f" + struct.pack("<HH", 0, 2) + bytes([2]) * 16 + bytes(64)
    for nics in (0, 1, 64, 65):
        yield b"\x02\x20" + _introduction(nics)
        yield b"\x03\x07" + _introduction(nics)
        yield b"\x05" + _introduction(nics)
    yield b"\x02\x00" + _introduction(1) + bytes(17000)
    for purpose in (1, 2, 3):
        hello = b"KVXF" + struct.pack("<HBB", 2, purpose, 0) + bytes(64)
        yield b"\x04\x03key" + bytes(16) + struct.pack("<I", 1) + hello
    yield b"\x04\x00" + bytes(20) + b"GET / HTTP/1.1\r\n\r\n"


def _bootstrap() -> Iterator[bytes]:
    hear, poll = b"\x00\x01", b"\x00\x05"
    yield b"\x00\x00" + b"\x00\x00" + poll + hear + poll + poll
    yield b"\x00\x02" + b"\x00\x00" + poll + b"\x01\x02\x07" + poll + b"\x02\x03\x04GET " + poll
    yield b"\x00\x00" + b"\x00\x03\x50" + b"KVXF" + bytes(76) + poll + b"\x00\x04" + poll
    yield b"\x01\x01\x01"
    yield b"\x01\x01\x00" + _introduction()
    yield b"\x01\x01\x00junk"
    for status in (0, 15, 16):
        reply = struct.pack("<HH", status, 2) + bytes(80)
        yield b"\x01\x00" + bytes([len(reply)]) + reply
    yield b"\x02\x01"
    yield b"\x02\x00\x04NOPE"


def _tcp_lane() -> Iterator[bytes]:
    def writes(key: int, imm: int | None, *offsets: int, length: int = 64) -> bytes:
        choice = bytes([0]) if imm is None else bytes([1, imm])
        each = b"".join(struct.pack("<BHBH", 0, at, 0, length) for at in offsets)
        return bytes([0, key]) + choice + bytes([len(offsets), 0]) + each + b"\x00"

    poll, post = b"\x03", b"\x04\x01\x00\x01\x20\x01\x00"
    yield writes(0, None, 0, 128) + poll
    yield writes(1, 1, 0, 64, 4000) + poll
    yield writes(1, 0, 0) + poll + writes(2, 2, 0) + poll + writes(1, 1, 0, length=0) + poll
    yield writes(1, 1, 0, 64)[:-1] + b"\xff\x30" + poll + b"\x05" + b"\x01\x20" + bytes(32) + poll
    yield writes(0, 0, 0, 4090) + poll + b"\x06" + writes(0, 0, 0) + poll
    yield post + b"\x02\x01\x00" + poll + post + b"\x02\x02\x06" + poll + b"\x02\x09\x00" + poll
    yield b"\x01\x28" + b"\x07" + bytes(39) + poll
    yield b"\x08" + poll


def _local_path() -> Iterator[bytes]:
    def batch(key: int, region: int | None, *offsets: int) -> bytes:
        where = bytes([0, 0]) if region is None else bytes([1, region])
        each = b"".join(struct.pack("<BBHBB", 16, 0, at, 1, 64) for at in offsets)
        return bytes([0, key, 1, 1]) + where + bytes([len(offsets), 0]) + each

    share, poll, events = b"\x04\x01\x01\x00", b"\x07", b"\x08"
    yield share + events + batch(1, 1, 0, 64) + poll
    yield share + batch(1, 1, 0) + poll + b"\x05\x01" + events + batch(1, 1, 0) + poll
    yield batch(1, None, 0, 128) + poll + b"\x09"
    yield batch(0, 2, 0) + poll + b"\x02\x01" + b"\xff" * 8 + poll
    post = b"\x0a\x00\x00\x02\x40\x01\x01"
    yield post + poll + b"\x0b\x00\x00\x03\x00" + poll + post + b"\x0b\x00\x06\xff" + b"\xff" * 9
    yield b"\x0a\x01\x00\x02\x40\x00" + poll + b"\x0c" + batch(1, 1, 0) + poll
    yield share + batch(1, 1, 0) + b"\x0d\x00\x01" + poll
    yield b"\x0d\x01\x02" + b"\x09" + batch(1, None, 0) + poll
    yield b"\x0d\x02" + batch(0, None, 0) + poll + b"\x0d\x03" + events
    for attached in (2, 3, 4):
        yield b"\x04\x00\x01" + bytes([attached]) + events
    yield b"\x06\x10" + struct.pack("<IIQ", 3, 1, 1) + events
    yield b"\x03\x00" + struct.pack("<QIIBBHI", 1, 2000, 0, 0, 0, 0, 0) + b"\x02\x00\x09" + poll


def _rendezvous() -> Iterator[bytes]:
    right = b"\x00\x01\x00"
    yield b"\x01\x01\x00\x01\x00\x00" + right + right + right  # a member at the acceptor
    yield b"\x01\x00\x00\x05wrong\x01\x00\x00" + right + right
    yield b"\x01\x01\xff" + bytes(4) + b"\x01\x00\x00" + right
    yield b"\x00\x01\x00\x00\x01" + right + right + right  # at the initiator
    yield b"\x00\x00\x05wrong\x00\x00\x01" + right + right
    for fds in (b"\x00\x02\x02\x01", b"\x00\x02\x03\x01", b"\x00\x04\x00\x01\x00\x01", b"\x00\x00"):
        yield b"\x01\x01\x00\x01\x00\x00" + b"\x00" + fds + b"\x00" + right
        yield b"\x00\x01\x00\x00\x01" + b"\x00" + fds + b"\x00" + right


def _control() -> Iterator[bytes]:
    def frame(kind: int, path: int, *fields: int) -> bytes:
        return bytes([0, kind, path, *fields])

    endpoint = (0, 16, 0, 0)
    opened = b"".join(frame(1, path, 0, *endpoint) for path in (1, 2))
    ready = b"\x02\x03"
    up = b"\x01" + opened + ready  # the initiator, with a path over each NIC
    accept = b"\x00" + frame(0, 1, 0, 0, *endpoint) + frame(2, 1) + b"\x02\x02\x00"
    keys = (2, 0, 1, 2, 3, 1, 4, 5)
    region = frame(6, 0, 1, 0, 200, 0, 0, 0, *keys)
    submit = bytes([5, 1, 1, 3, 8, 1, 0])  # four writes with an immediate
    bare = bytes([5, 0, 1, 3, 1, 0])
    windowed = frame(6, 0, 1, 0, 200, 0, 1, 2, 0, 0)

    def complete(nic: int) -> bytes:
        return bytes([6, nic, 0])

    def lose(nic: int) -> bytes:
        return bytes([8, nic, 0])

    def closed(path: int, landed: int, *, failed: int = 1) -> bytes:
        return frame(3, path, 1, 120, failed, 1, 0, 0, landed)

    for landed in (0, 1, 2, 4, 9):
        yield (
            up
            + submit
            + region
            + complete(0)
            + lose(0)
            + lose(1)
            + closed(1, landed)
            + closed(2, landed)
            + b"\x0c\x00\x02"
            + opened
        )
    for _ in range(2):
        yield up + region + submit + closed(1, 1, failed=0) + closed(2, 0, failed=0)
    again = lose(0) + lose(1) + closed(1, 1) + closed(2, 1) + b"\x0c\xff\x00"
    more = frame(1, 3, 0, *endpoint) + frame(1, 4, 0, *endpoint)
    yield up + region + submit + again + more + region + complete(0) * 4 + complete(1) * 4
    yield (
        up
        + region
        + submit
        + again
        + more
        + region
        + lose(0)
        + lose(1)
        + closed(3, 2)
        + closed(4, 2)
    )
    yield up + submit + frame(6, 0, 1, 5, 200, 0, 0, 0, *keys) + submit + frame(7, 0, 1)
    yield up + region + submit + frame(8, 0, 0, 0) + frame(8, 0, 0, 1) + submit
    yield up + region + submit + frame(8, 0, 0, 1) + lose(0) + closed(1, 0) + complete(1) * 4
    yield up + submit + frame(9, 0, 1) + b"\x0e" + bare + complete(0) * 4 + complete(1) * 4
    yield up + windowed + submit + frame(11, 1, 1, 9, 9) + frame(11, 2, 1, 9, 9) + complete(1) * 4
    yield up + windowed + submit + frame(7, 0, 1) + b"\x0d\x00"
    granted = frame(6, 0, 1, 0, 200, 1, 0, 1, 2, 0, 0)
    yield up + granted + submit + frame(7, 0, 1)
    yield up + granted + bytes([5, 1, 1, 3, 8, 1, 0]) + frame(8, 0, 0, 0) + granted
    yield up + granted + frame(6, 0, 1, 0, 200, 1, 1, 0, 0, 0, 0)
    yield up + submit + frame(6, 0, 1, 0, 4, 0, 0, 0, *keys)
    yield up + b"\x0b\x01\x01" + b"\x09\x01\x00" + b"\x0b\x00\x00" + frame(9, 0, 1)
    yield up + b"\x0b\x01\x01" + b"\x09\x01\x00" + lose(1) + b"\x0b\x00\x01" + b"\x0b\x01\x00"
    yield up + b"\x02\x01\x05hello" + b"\x02\x00" + b"\x02\x04\x13\x03why"
    yield up + b"\x0a\x00\x00\x00" + b"\x0c\xff\x00" + b"\x0f" + b"\x0d\x00"
    yield up + b"\x07\x00\x00\x00" * 5 + frame(10, 1, 3) + frame(4, 0, 1) + frame(5, 0, 0)
    yield accept + region + submit + complete(0) * 4 + b"\x02\x03"
    yield accept + frame(0, 2, 9, 0, *endpoint) + frame(0, 1, 0, 0, *endpoint)
    yield accept + b"\x0a\x00\x00\x00" + frame(0, 2, 0, 0, *endpoint) + frame(0, 3, 1, 1, 1, 1, 7)
    yield accept + b"\x0a\x01\x01\x01" + frame(0, 2, 1, 1, *endpoint)
    yield b"\x01" + frame(1, 1, 3, 1, 1, 120) + frame(1, 2, 0, 1, 1, 120) + frame(1, 9, 0, 1, 0)
    yield b"\x01" + frame(1, 1, 0, *endpoint) * 2 + frame(2, 1, 0, 0, 0, 0) + frame(0, 1, 0, 0)
    yield b"\x01" + lose(0) + frame(1, 1, 0, *endpoint) + b"\x0c\xff\xff"
    for kind in (0, 1, 2, 6, 11):
        yield up + bytes([3, 16 + kind, 2]) + b"xx"
    yield b"\x00\x03\x63" + b"\x02xx" + b"\x04\x08" + struct.pack("<IB3x", 1 << 30, 2)
    yield b"\x00\x04\x08" + struct.pack("<IB3x", 1 << 30, 2)


def _descriptors() -> Iterator[bytes]:
    yield b"\x00KMR\x01" + bytes(16) + struct.pack("<QQQ", 1, 2, 3)
    for host in (b"127.0.0.1:7000", b"[::1]:7000", b"node-5:65535", b"[]:1", b":1", b"h:0"):
        yield b"\x01kvx://" + host + b"/" + b"0123456789abcdef" * 2
    yield b"\x01kvx://h:1/" + b"0123456789ABCDEF" * 2
    yield b"\x01kvx://h:1"
    yield b"\x01http://h:1/"
    yield b"\x01kvx://h/" + b"0" * 32
    yield b"\x02\x00" + struct.pack("<IIIHBB16s", 17, 5, 64, 3, 5, 2, b"gid")
    yield b"\x02\x01" + struct.pack("<QQQQ", 1, 2, 3, 256) + _text(b"address")
    yield b"\x03" + struct.pack("<IIQ", 1, 0, 4096)
    yield b"\x04" + struct.pack("<QBQBBB", 1 << 40, 0, 0, 1, 200, 4)
    yield b"\x04" + struct.pack("<QBQBIB", 1 << 40, 0, 0, 0, 1 << 24, 4)
    yield b"\x04" + struct.pack("<QBQBBB", 64, 0, 0, 1, 0, 4)
    yield b"\x05" + struct.pack("<Q", 1 << 20) + b"\x40\x40\x40\x00\x00" + bytes(range(32))
    yield b"\x05" + struct.pack("<Q", 8) + b"\x40\x40\x40\x00\x00" + bytes(8)
    yield b"\x05" + struct.pack("<Q", 0) + b"\x00"


ODD_FIELDS: Final = (
    {"num_kv_heads": 2},
    {"kv": "opaque", "order": "HND"},
    {"kv": "opaque", "order": "HND", "packing": "vec"},
    {"block_size": 65535},
    {"layer_groups": (0, 1, 0, 1)},
    {"order": "HND", "tp_size": 2, "block_size": 8},
)


def _messages() -> Iterator[bytes]:
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
        Hello(PROTOCOL_VERSION, "p", 7, layout, 32, ((8192, 8192),) * 4, True) for layout in layouts
    ]
    said += [
        Offer("t", "a.b.c", b"\x01\0\0\0", (b"descriptor",) * 2, 2**32 - 1, 1.5, 3),
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
        *({"layout": replace(good.layout, **field)} for field in ODD_FIELDS),
    ):
        strides = good.block_strides
        if (layout := change.get("layout")) is not None:
            strides = ((1 << 20,) * len(layout.parts),) * layout.layers_per_rank
        hello = msgspec.structs.replace(good, **{"block_strides": strides, **change})
        yield b"\x00" + encode(hello)
    # Fields that a writer of this version cannot make.
    wrong = json.loads(json.dumps({"num_layers": 1, "num_kv_heads": 1, "head_size": 1}))
    for more in ({"dtype": "?"}, {"dtype": "int8", "block_size": 1, "layer_groups": [2**31 - 1]}):
        layout = {**wrong, **more}
        hello = {
            "type": "hello",
            "version": PROTOCOL_VERSION,
            "instance_id": "p",
            "epoch": 1,
            "num_blocks": 1,
        }
        yield b"\x00" + _packed({**hello, "layout": layout, "block_strides": [], "permutes": True})
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


def _packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _tickets() -> Iterator[bytes]:
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
    table = {
        "offer": {
            "type": "offer",
            "transfer_id": "t",
            "ticket": "a.b.c",
            "blocks": "AAAA",
            "grants": ["AAAA"],
            "imm": 2**70,
            "lease_seconds": 1,
        },
        "decode_id": "d",
        "decode_epoch": 1,
        "kid": "a",
        "mac": "AAAA",
    }
    yield b"\x04" + json.dumps(table).encode()
    yield b"\x05\x01p\x01\x03kvx\x01m\x01b\x10\x40"
    yield b"\x06\x01\x01t\x01r\x01p\x01\x01d\x01\x00\x06\x00"


def _answers() -> Iterator[bytes]:
    events = "id: 7\nevent: change\ndata: {}\ndata: x\n\n: comment\r\n\rdata:a\u2028b\r\r\n"
    yield b"\x00\x03" + events.encode()
    yield b"\x00\xff" + b"data: \xff\xfe\n\n"
    yield b"\x00\x40" + b"data: " + b"x" * 600
    yield b"\x00\xff" + b"data: 400\n" * 80
    yield b"\x01\x00" + (b"\xff" + b"x" * 255) * 3
    yield b"\x00\x00" + b"id\0: 1\nid: a\0\ndata\n\n"
    change = b"event: change\nid: 1\ndata: {"
    yield b"\x01\x01\x05" + bytes([len(change)]) + change + b"\x03}\n\n"
    yield b"\x01\x00\x1aevent: snapshot\ndata: {}\n\n\x0cdata: [1]\n\n"
    problem = {"type": "about:blank", "title": "t", "status": 429, "detail": "d"}
    codes = (
        "rate-limited",
        "layout-mismatch",
        "no-capacity",
        "internal-error",
        "?",
        "lease-expired",
    )
    for code in codes:
        body = json.dumps({**problem, "code": code, "message": "m", "self": 1, "field": "f"})
        yield b"\x02\x00\x05\x00\x00\x00" + body.encode()
        yield b"\x03\x00" + body.encode()
    for seconds in ("1.5", "1e308", "1" + "0" * 400, '"x"', "-3"):
        body = f'{{"code": "rate-limited", "detail": "d", "retry_after_seconds": {seconds}}}'
        yield b"\x02\x00\x05\x01\x03120\x01\x03abc\x01\x01r" + body.encode()
    yield b"\x02\x01\x00\x00\x01\x031.5\x00[]"
    yield b"\x02\x00\x00\x01\x02\xff\xb2\x01\x02\xc3\xa9\x00{}"
    yield b"\x02\x00\x07\x00\x00\x00not json"
    for seconds in ("1.5", "1" + "0" * 400, "-3"):
        body = f'{{"code": "rate-limited", "detail": "d", "retry_after_seconds": {seconds}}}'
        yield b"\x02\x00\x05" + b"\x01\x03120" + b"\x00\x00" + body.encode()
    for stale in (b"1.5", b"old"):
        yield b"\x02\x01\x00" + b"\x00\x01\x03" + stale + b"\x00" + b'{"instances": []}'
    yield (
        b"\x02\x00\x05" + b"\x01\x03120" + b"\x00\x00" + b'{"code": "rate-limited", "detail": "d"}'
    )
    snapshot = b'event: snapshot\ndata: {"id": 1, "instances": []}\n\n'
    yield b"\x01\x00" + bytes([len(snapshot)]) + snapshot
    for error in ({"message": "m"}, {"code": 1}, "text", None):
        yield b"\x03\x00" + json.dumps({"error": error}).encode()


def _router_bodies() -> Iterator[bytes]:
    completion = {"model": "m", "prompt": "text", "stream": True, "max_tokens": 4}
    yield b"\x00" + json.dumps({**completion, "stream_options": {"include_usage": True}}).encode()
    yield b"\x00" + json.dumps({**completion, "prompt": [1, 2, 3], "extra": [{}]}).encode()
    wrong = ({"prompt": ["a"]}, {"prompt": None}, {"model": ""}, {"kv_transfer_params": {}})
    for other in wrong:
        yield b"\x00" + json.dumps({**completion, **other}).encode()
    yield b"\x00{" + b"\x00[]" + b"\x00"
    yield b"\x00[]"
    parts = [{"type": "text", "text": "t"}, {"type": "image_url"}, "x"]
    for content in ("text", parts, None, 7):
        chat = {"model": "m", "messages": [{"role": "user", "content": content}]}
        yield b"\x01" + json.dumps(chat).encode()
    yield b"\x01" + json.dumps({"model": "m", "messages": []}).encode()
    yield b"\x02\x07\x80\x01m"
    for edge in range(0xE0, 0xEC):
        yield b"\x02" + bytes([edge]) + b"\x80\x01m"
    params = {"ticket": "a.b.c", "prefill_engine_address": "kvx://h", "prefill_rank_addresses": []}
    for more in ({}, {"handshake": "brokered"}, {"prefill_rank_addresses": [1]}, {"ticket": 1}):
        yield b"\x03" + json.dumps({**params, **more}).encode()
    yield b"\x03{}"


def _sglang_bootstrap() -> Iterator[bytes]:
    put = b"\x00\x05"
    for length in range(4):
        yield put + bytes([length]) + b"GET /health HTTP/1.1\r\n\r\n"
    yield b"\x00\x00\x00" + b"GET /route?engine_rank=0 HTTP/1.0\r\n\r\n"
    yield b"\x01\x10" + b"GET / HTTP/1.0\r\n" + b"PUT /route HTTP/1.1\r\n\r\n"
    yield put + b"\x00" + b"PUT /route HTTP/1.0\r\nContent-Length: 3\r\n\r\na.b"
    yield put + b"\x00" + b"DELETE /route HTTP/9\r\n\r\n"


def _endpoint() -> Iterator[bytes]:
    # Whether HELLO, a prefill and a decode session come first; then what the peer says: 0, and
    # what kind of message; 0xff, and a write of the peer arrives.
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
    yield prefill + offer(to_peer) + b"\xfe"
    yield greeted + b"\x00\x00" + say(4, from_peer, from_peer) + cancel + say(4, early, early)
    yield greeted + b"\x00\x00" + accepted + refused + b"\x00" + done(b"\x01")
    yield b"\x00\x01\x01" + offer(to_peer)
    yield b"\x00\x00\x00" + say(10, b"\x05junk!")
    yield greeted + b"\x00\x00" + say(0, b"\x01\x01\x01\x01\x00\x01\x01", hello[1:])
    yield greeted + b"\x00\x00" + say(0, b"\x00\x00\x00\x03\x00\x00\x00")
    for wrong in (b"\0\0\xff\x05", b"\0\0\0\0\0\xff\0", b"\0\xff\x07\x01\x02"):
        yield b"\x00\x00\x00" + say(0, wrong)


NATIVE: Final = {
    "handshake": _handshake,
    "bootstrap": _bootstrap,
    "control": _control,
    "tcp_lane": _tcp_lane,
    "local_path": _local_path,
    "rendezvous": _rendezvous,
    "descriptors": _descriptors,
}


PYTHON: Final = {
    "messages": _messages,
    "tickets": _tickets,
    "answers": _answers,
    "router_bodies": _router_bodies,
    "sglang_bootstrap": _sglang_bootstrap,
    "endpoint": _endpoint,
}


def write() -> None:
    for target, inputs in (NATIVE | PYTHON).items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(inputs()):
            (folder / f"seed-{number:02}").write_bytes(content)


if __name__ == "__main__":
    write()
