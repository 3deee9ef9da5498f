"""A fake engine on this host that has the cluster key, and stops at any step of the handshake."""

from __future__ import annotations

import os
import socket
import struct

from . import wire
from .hostile import PATIENCE, read


class FakeEngine:
    """An engine that accepts one control stream, and then sends nothing."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.engine = os.urandom(16)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE)
        self.unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.unix.bind(f"\0kvxfer-{self.engine.hex()}")
        self.unix.listen()
        self.unix.settimeout(PATIENCE)
        self.address = f"kvx://127.0.0.1:{self.listener.getsockname()[1]}/{self.engine.hex()}"

    def accept(self) -> socket.socket:
        """Accepts a control stream. Both sides are authenticated when it returns."""
        sock, _ = self.listener.accept()
        hello = read(sock, wire.HELLO_BYTES)
        reply = struct.pack("<HH", 0, wire.VERSION) + self.engine + os.urandom(32)
        transcript = hello + reply + bytes(32)
        sock.sendall(reply + wire.mac(self._key, b"kvxfer reply", transcript))
        session_key = wire.mac(self._key, b"kvxfer session key", transcript)
        head = read(sock, wire.PROOF_BYTES)
        theirs = read(sock, int.from_bytes(head[2:4], "little"))
        transcript += theirs
        # Claims to run on the same host, and offers tcp for the way back.
        host_at = 2 + int.from_bytes(theirs[:2], "little")
        host_size = int.from_bytes(theirs[host_at : host_at + 2], "little")
        host = theirs[host_at + 2 : host_at + 2 + host_size]
        body = wire.introduction(b"fake", host, local=True, tcp=True, lanes=1)
        code = wire.mac(session_key, b"kvxfer accept", transcript + body)
        sock.sendall(struct.pack("<HH", 0, len(body)) + code + body)
        return sock

    def close(self) -> None:
        self.listener.close()
        self.unix.close()
