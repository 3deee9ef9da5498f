"""The hand-over of memory between ranks on one host."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from typing import Final, NamedTuple, Self

from kvxfer.errors import PeerLost

SECRET_BYTES: Final = 16
_HEADER: Final = struct.Struct(f"={SECRET_BYTES}sQ")
_BACKLOG: Final = 4096


class Handed(NamedTuple):
    """The file descriptors of a rank's memory, which the context manager closes."""

    memory: int
    doorbell: int
    nbytes: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self.memory)
        os.close(self.doorbell)


def give(name: str, secret: bytes, handed: Handed) -> None:
    """Sends duplicates to the socket of that name, without waiting until they are taken. Raises
    PeerLost."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sender:
        sender.setblocking(False)
        try:
            sender.connect(f"\0{name}")
            header = _HEADER.pack(secret, handed.nbytes)
            socket.send_fds(sender, [header], [handed.memory, handed.doorbell])
        except OSError as error:
            raise PeerLost(f"the memory socket {name} takes nothing: {error}") from error


class MemorySocket:
    """An abstract unix socket, which drops descriptors without an expected secret."""

    def __init__(self) -> None:
        self.name = f"kvxfer-moe-{secrets.token_hex(SECRET_BYTES)}"
        self._expected: set[bytes] = set()
        self._taken: dict[bytes, Handed] = {}
        self._open: list[socket.socket] = []
        """Connections without data so far: the giver is between connect() and send()."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(_BACKLOG)

    def expect(self) -> bytes:
        """Returns a new secret, for one rank."""
        secret = secrets.token_bytes(SECRET_BYTES)
        self._expected.add(secret)
        return secret

    def take(self, secret: bytes) -> Handed:
        """Returns what was given with this secret. Raises PeerLost if nothing was."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._open.append(self._socket.accept()[0])
        for connection in self._open[:-_BACKLOG]:
            connection.close()
        self._open = [each for each in self._open[-_BACKLOG:] if not self._receive(each)]
        if secret not in self._taken:
            raise PeerLost("the rank on this host has not handed its memory over")
        self._expected.discard(secret)
        return self._taken.pop(secret)

    def close(self) -> None:
        self._socket.close()
        for connection in self._open:
            connection.close()
        for handed in self._taken.values():
            with handed:
                pass

    def _receive(self, connection: socket.socket) -> bool:
        """Reads a connection. If data came, or the giver is gone, closes it and returns True."""
        connection.setblocking(False)
        header, fds = b"", list[int]()
        try:
            header, fds, _, _ = socket.recv_fds(
                connection, _HEADER.size, 2, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:
            pass
        connection.close()
        if len(header) == _HEADER.size and len(fds) == 2:
            secret, nbytes = _HEADER.unpack(header)
            if secret in self._expected and secret not in self._taken:
                self._taken[secret] = Handed(fds[0], fds[1], nbytes)
                return True
        for fd in fds:
            os.close(fd)
        return True
