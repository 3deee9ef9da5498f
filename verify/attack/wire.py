"""A second implementation of the wire formats of docs/protocol.md, for the hostile peer."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"KVXF"
VERSION: Final = 2
CONTROL, LANE = 1, 2  # the request of a hello
HELLO_BYTES: Final = 72
REPLY_BYTES: Final = 84
PROOF_BYTES: Final = 36
LOCAL_LANE: Final = 0xFFFFFFFF
LANE_ACCEPTED: Final = b"LNOK"

HEARTBEAT, MESSAGE, PATHS, READY, GOODBYE = 1, 2, 3, 4, 5  # control frames
WRITES, ACK = 1, 2  # tcp frames
ACK_BYTES: Final = 40

# The values of Errc on the wire.
STATUS: Final = {
    0: "ok",
    5: "unknown-region",
    6: "out-of-bounds",
    7: "stale-counter",
    15: "authentication-failed",
    16: "peer-restarted",
    19: "protocol-error",
}


def mac(key: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.new(key, purpose + b"\0" + data, hashlib.sha256).digest()


def hello(engine: bytes, target: bytes, nonce: bytes | None = None) -> bytes:
    nonce = os.urandom(32) if nonce is None else nonce
    return MAGIC + struct.pack("<HBB", VERSION, CONTROL, 0) + engine + target + nonce


def introduction(name: bytes, host: bytes, *, local: bool, tcp: bool, lanes: int) -> bytes:
    text = b"".join(struct.pack("<H", len(each)) + each for each in (name, host))
    return text + struct.pack("<BBHQH", local, tcp, lanes, 100_000_000, 0)


def proof(body: bytes, transcript: bytes, session_key: bytes) -> bytes:
    code = mac(session_key, b"kvxfer proof", transcript + body)
    return struct.pack("<HH", 0, len(body)) + code + body


@dataclass(frozen=True, slots=True)
class Session:
    """The state that both sides have after a handshake."""

    key: bytes

    @property
    def id(self) -> bytes:
        return mac(self.key, b"kvxfer session id", b"")[:16]

    def lane_hello(self, lane: int) -> bytes:
        head = MAGIC + struct.pack("<HBB", VERSION, LANE, 0) + self.id
        head += struct.pack("<I", lane) + bytes(12)
        return head + mac(self.key, b"kvxfer lane", head + bytes(32))

    def local_mac(self) -> bytes:
        return mac(self.key, b"kvxfer local", bytes(32))


def control_frame(kind: int, body: bytes = b"", size: int | None = None) -> bytes:
    return struct.pack("<IB3x", len(body) if size is None else size, kind) + body


def writes_frame(
    key: int, writes: list[tuple[int, int]], imm: int | None, count: int | None = None
) -> bytes:
    """Returns the header and descriptors of a batch; writes are (offset, length)."""
    offset, length = writes[0]
    head = struct.pack(
        "<BBHIQIIQII",
        WRITES,
        imm is not None,
        0,
        imm or 0,
        key,
        len(writes) if count is None else count,
        0,
        offset,
        length,
        0,
    )
    return head + b"".join(struct.pack("<QII", at, size, 0) for at, size in writes[1:])


def ack_status(frame: bytes) -> str:
    kind, _, status = struct.unpack_from("<BBH", frame)
    assert kind == ACK, f"frame of type {kind}"
    return STATUS.get(status, str(status))
