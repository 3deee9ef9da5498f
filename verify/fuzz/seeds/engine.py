"""Seeds of the C++ targets. The numbers are the choices of engine_native/fuzz, in order."""

from __future__ import annotations

import struct
from collections.abc import Iterator


def _text(value: bytes) -> bytes:
    return struct.pack("<H", len(value)) + value


def _introduction(nics: int = 1) -> bytes:
    head = _text(b"decode-0") + _text(b"boot/net:[1]") + struct.pack("<BBHQ", 1, 1, 2, 10**8)
    nic = _text(b"mlx5_0") + _text(b"roce") + struct.pack("<Q", 400 * 10**9)
    return head + struct.pack("<H", nics) + nics * nic


def handshake() -> Iterator[bytes]:
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
    yield b"\x00\x00\x10" + bytes(200)
    for status in (0, 15, 16):
        yield b"\x01\x10" + struct.pack("<HH", status, 2) + bytes(200)


def bootstrap() -> Iterator[bytes]:
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


def tcp_lane() -> Iterator[bytes]:
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
    yield b"\x01\x60" + b"\x07" + bytes(95) + poll
    yield b"\x00\x00\x00\x01\xff" + bytes(4) + bytes(6) + b"\x00" + poll
    yield b"\x00\x00\x00\x01\x00\x00\x00\x00\x00\xff\xff" + bytes(3) + b"\x40\x00" + poll
    yield writes(0, None, 0) * 2 + poll * 2
    for key in range(3):
        half = writes(key, key, 0, 64)[:-1] + b"\xff\x30" + poll
        yield half + b"\x05" + poll
        yield half + b"\x06" + poll


def tcp_lane_gpu() -> Iterator[bytes]:
    yield from tcp_lane()


def _batch(key: int, region: int | None, *offsets: int, source: bytes = b"\x10") -> bytes:
    where = bytes([0, 0]) if region is None else bytes([1, region])
    each = b"".join(source + struct.pack("<BHBB", 0, at, 1, 64) for at in offsets)
    return bytes([0, key, 1, 1]) + where + bytes([len(offsets), 0]) + each


def local_path() -> Iterator[bytes]:
    batch = _batch
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


def local_path_gpu() -> Iterator[bytes]:
    yield from local_path()
    poll, events, size = b"\x07", b"\x08", b"\xff" + struct.pack("<Q", 4096)

    def share(
        number: int, files: int, reader: int = 0, *, probe: bool = False, other: bool = False
    ) -> bytes:
        """Returns the choices for a share. With `other`, a GPU reads another GPU's memory."""
        head = bytes([5, 0xF0 + number + 8 * probe]) + size + bytes([16, 0, reader])
        return head + bytes([files, 1]) + b"\x01" * files + bytes([other, probe, 0]) + events

    def answer(kind: int, number: int = 0) -> bytes:
        """Returns the choices for an answer of kind 0 (refused), 1 (opened) or 2 (untried)."""
        return bytes([5, 0xE0, kind]) + b"\x03why" * (not kind) + bytes([number]) + events

    def post(reader: int) -> bytes:  # four writes from a GPU to a GPU of the peer
        return b"\x0a\x01\x00\x03\x40\x01\x01\x01" + bytes([reader])

    for files in (0, 1, 2):
        for key in (0, 1, 2):
            yield share(1, files) + _batch(key, 1, 0, 64) + (poll + events) * 3
    yield share(1, 1) + _batch(1, 1, 0) + poll + b"\x05\x01" + events + _batch(1, 1, 0) + poll
    yield share(1, 1) + _batch(1, 1, 0) + poll + b"\x0c" + _batch(1, 1, 0) + poll + events
    yield share(1, 1) + _batch(0, 1, 0) + poll + b"\x0d\x02" + _batch(0, 1, 0) + poll
    yield share(1, 1) + b"\x05\x01" + events * 2 + share(1, 1) * 2 + share(2, 1, reader=1)
    for source in (4096, 1 << 21):
        beyond = _batch(0, 1, 0, source=b"\xff" + struct.pack("<Q", source))
        yield share(1, 1) + beyond + poll + share(2, 0) + _batch(0, 2, 0) + poll + events
    for kind in (0, 1, 2):
        yield post(0) + poll + answer(kind) + post(0) + (poll + events) * 3
        yield post(0) + post(1) + answer(kind, 1) + post(1) + poll + b"\x0b\x00\x06\x05\x00"
        asked = post(0) + answer(2) + post(0) + events
        yield asked + answer(kind, 1) + post(0) + events + answer(kind, 2) + post(0) + poll
    for other in (True, False):
        yield share(1, 1, other=other) + _batch(1, 1, 0) + poll
        for files in (0, 1, 2):
            tried = share(1, files, probe=True, other=other)
            yield tried + share(1, 1, other=other) + _batch(1, 1, 0) + (poll + events) * 2


def rendezvous() -> Iterator[bytes]:
    right = b"\x00\x01\x00"
    yield b"\x01\x01\x00\x01\x00\x00" + right + right + right  # a member at the acceptor
    yield b"\x01\x00\x00\x05wrong\x01\x00\x00" + right + right
    yield b"\x01\x01\xff" + bytes(4) + b"\x01\x00\x00" + right
    yield b"\x00\x01\x00\x00\x01" + right + right + right  # at the initiator
    yield b"\x00\x00\x05wrong\x00\x00\x01" + right + right
    for fds in (b"\x00\x02\x02\x01", b"\x00\x02\x03\x01", b"\x00\x04\x00\x01\x00\x01", b"\x00\x00"):
        yield b"\x01\x01\x00\x01\x00\x00" + b"\x00" + fds + b"\x00" + right
        yield b"\x00\x01\x00\x00\x01" + b"\x00" + fds + b"\x00" + right


def control() -> Iterator[bytes]:
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

    def stopped(path: int, delivered: int, *, failed: int = 1) -> bytes:
        return frame(12, path, 1, 120, failed, delivered)

    for delivered in (0, 1, 3):
        for arrived in (b"", b"\x07\x00\x00\x00"):
            yield (
                up
                + region
                + submit
                + complete(0)
                + stopped(1, delivered)
                + arrived
                + b"\x0c\xff\x0f"
                + closed(1, 1)
            )
            yield up + region + submit + lose(0) + arrived + stopped(1, delivered) + closed(1, 1)
    yield up + stopped(1, 0) * 2
    yield up + stopped(1, 9) + b"\x0f" + closed(1, 0) + stopped(1, 0)
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
    yield accept + frame(0, 2, 0, 2, *endpoint)
    yield accept + b"\x0a\x00\x00\x00" + frame(0, 2, 0, 0, *endpoint) + frame(0, 3, 1, 1, 1, 1, 7)
    yield accept + b"\x0a\x01\x01\x01" + frame(0, 2, 1, 1, *endpoint)
    yield b"\x01" + frame(1, 1, 3, 1, 1, 120) + frame(1, 2, 0, 1, 1, 120) + frame(1, 9, 0, 1, 0)
    yield b"\x01" + frame(1, 1, 0, *endpoint) * 2 + frame(2, 1, 0, 0, 0, 0) + frame(0, 1, 0, 0)
    yield b"\x01" + lose(0) + frame(1, 1, 0, *endpoint) + b"\x0c\xff\xff"
    for kind in (0, 1, 2, 6, 11):
        yield up + bytes([3, 16 + kind, 2]) + b"xx"
    yield b"\x00\x03\x63" + b"\x02xx" + b"\x04\x08" + struct.pack("<IB3x", 1 << 30, 2)
    yield b"\x00\x04\x08" + struct.pack("<IB3x", 1 << 30, 2)


def descriptors() -> Iterator[bytes]:
    yield b"\x00KMR\x01" + bytes(16) + struct.pack("<QQQ", 1, 2, 3)
    yield b"\x00KMR\x01" + bytes(16) + struct.pack("<QQQ", 1, 0xFFFFFFFF_00010000, 3)  # a grant
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
    far = b"\xff" + struct.pack("<Q", 1 << 40)
    pages = b"\x05" + struct.pack("<Q", 1 << 20) + b"\x40\x40\x40\x00\x00" + b"\x00\x00\x01\x01"
    yield pages + far + b"\x02"
    yield pages + b"\x02" + far
    yield b"\x04" + struct.pack("<QBQBBB", 64, 0, 0, 1, 200, 4)
    yield b"\x04" + struct.pack("<Q", 1 << 30) + far + struct.pack("<QBBB", 0, 1, 200, 4)
    yield b"\x06\x01\xc8\x02\xc8" + bytes([0, 0, 0, 9, 1, 9, 9, 9, 2, 0, 0, 200, 3, 50, 50, 50])
    yield b"\x06\x01\xc8\x01\x00" + bytes([0, 0, 0, 9, 0, 0, 200, 9])
    yield b"\x06"
