"""A peer that violates the protocol: raw blocking sockets, one step at a time."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from . import wire

PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """The address of an engine."""

    host: str
    port: int
    engine: bytes

    @classmethod
    def of(cls, address: str) -> Target:
        """Parses kvx://HOST:PORT/ENGINE."""
        place, engine = address.removeprefix("kvx://").rsplit("/", 1)
        host, port = place.rsplit(":", 1)
        return cls(host, int(port), bytes.fromhex(engine))

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), PATIENCE)

    def connect_local(self) -> socket.socket:
        """Connects to the unix socket of the local fabric."""
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unix.settimeout(PATIENCE)
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                unix.connect(f"\0kvxfer-{self.engine.hex()}")
            except BlockingIOError:  # the backlog is full
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.001)
            else:
                return unix


def read(sock: socket.socket, size: int) -> bytes:
    """Reads `size` bytes; fewer if the other side has closed."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while len(found) < size and (more := sock.recv(size - len(found))):
            found += more
    return found


def closed(sock: socket.socket, seconds: float = PATIENCE) -> bool:
    """Returns whether the other side closes the connection in time. Drops what it sends."""
    give_up = time.monotonic() + seconds
    while (left := give_up - time.monotonic()) > 0:
        if not select.select([sock], [], [], left)[0]:
            return False
        try:
            if not sock.recv(65536):
                return True
        except ConnectionError:
            return True
    return False


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Returns a copy with one bit changed."""
    changed = bytearray(data)
    at = rng.randrange(8 * len(data))
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


class Handshake:
    """The client's side, message by message. Each message can be altered or withheld."""

    def __init__(
        self, target: Target, key: bytes, *, name: str = "hostile", lanes: int = 1
    ) -> None:
        self.sock = target.connect()
        self._key = key
        self._hello = wire.hello(os.urandom(16), target.engine)
        self._introduction = wire.introduction(
            name.encode(), b"another host", local=True, tcp=True, lanes=1
        )

    def hello(self) -> bytes:
        return self._hello

    def answer(self, reply: bytes) -> tuple[bytes, wire.Session]:
        """Returns the proof, and the session that it opens."""
        transcript = self._hello + reply[:-32] + bytes(32)
        session = wire.Session(wire.mac(self._key, b"kvxfer session key", transcript))
        return wire.proof(self._introduction, transcript, session.key), session

    def run(self) -> wire.Session | None:
        """Runs the handshake. Returns None if the server refuses the proof."""
        self.sock.sendall(self.hello())
        proof, session = self.answer(read(self.sock, wire.REPLY_BYTES))
        self.sock.sendall(proof)
        accept = read(self.sock, wire.PROOF_BYTES)
        if len(accept) < wire.PROOF_BYTES or accept[:2] != b"\0\0":
            return None
        read(self.sock, int.from_bytes(accept[2:4], "little"))
        return session


class Member:
    """A hostile peer that knows the cluster key: a compromised worker."""

    def __init__(self, target: Target, key: bytes, *, name: str = "hostile") -> None:
        self.target = target
        handshake = Handshake(target, key, name=name)
        session = handshake.run()
        assert session is not None, "the victim refused the right key"
        self.session = session
        self.control = handshake.sock

    def lane(self, lane: int = 0) -> socket.socket:
        """Opens a tcp lane."""
        sock = self.target.connect()
        sock.sendall(self.session.lane_hello(lane))
        accepted = read(sock, len(wire.LANE_ACCEPTED))
        assert accepted == wire.LANE_ACCEPTED, f"the lane was answered with {accepted!r}"
        return sock

    def announce(self, paths: int) -> None:
        """Announces the number of open paths. This makes it a peer of the victim."""
        self.control.sendall(wire.control_frame(wire.PATHS, paths.to_bytes(4, "little")))

    def message(self, data: bytes) -> None:
        self.control.sendall(wire.control_frame(wire.MESSAGE, data))

    def beat(self) -> None:
        with contextlib.suppress(OSError):
            self.control.sendall(wire.control_frame(wire.HEARTBEAT))
            self.control.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while self.control.recv(65536):
                    pass
            self.control.settimeout(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.control.close()


class TcpWriter:
    """A writer of batches over a tcp lane. The victim answers each with a status."""

    def __init__(self, member: Member) -> None:
        self.lane = member.lane()
        member.announce(1)
        self._member = member

    def write(
        self, key: int, writes: list[tuple[int, int]], imm: int | None, payload: bytes | None = None
    ) -> str:
        """Writes a batch. Returns its status, or "cut off" if the victim closes the connection."""
        self._member.beat()
        if payload is None:
            payload = b"\xee" * sum(length for _, length in writes)
        try:
            self.lane.sendall(wire.writes_frame(key, writes, imm) + payload)
        except ConnectionError:
            return "cut off"
        frame = read(self.lane, wire.ACK_BYTES)
        return wire.ack_status(frame) if len(frame) == wire.ACK_BYTES else "cut off"

    def close(self) -> None:
        self.lane.close()
