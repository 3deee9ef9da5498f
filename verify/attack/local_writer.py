"""The local fabric from outside: rings in shared memory, written by hand."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import time
from typing import Final

from . import wire
from .hostile import PATIENCE, Member

_SLOTS: Final = 16384
_SLOT_BYTES: Final = 24
_HEAD: Final = 256  # produced, consumed, sleeps, revoked: a cache line each
_RING_BYTES: Final = _HEAD + _SLOTS * _SLOT_BYTES
_F_ADD_SEALS: Final = 1033
_SEALS: Final = 1 | 2 | 4  # seal, shrink, grow


class LocalWriter:
    """A writer of batches over the ring of a local path. The victim answers each with a status."""

    def __init__(self, member: Member, *, sealed: bool = True) -> None:
        self._member = member
        self.socket = member.target.connect_local()
        self._fd = os.memfd_create("hostile ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, _RING_BYTES)
        if sealed:
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
        self._ring = mmap.mmap(self._fd, _RING_BYTES)
        # Each position is one store: struct would write zeros first, which the victim could see.
        self._published = ctypes.c_uint64.from_buffer(self._ring, 0)
        self._consumed = ctypes.c_uint64.from_buffer(self._ring, 64)
        ctypes.c_uint64.from_buffer(self._ring, 128).value = (1 << 64) - 1  # awake
        wake = os.eventfd(0)
        self._source = ctypes.create_string_buffer(b"\xee" * 4096, 4096)
        self._produced = 0
        send(self.socket, member.session.lane_hello(wire.LOCAL_LANE), [self._fd, wake])
        _, descriptors = receive(self.socket)
        if len(descriptors) != 2:
            raise ConnectionError("the victim refused the rendezvous")
        self.peer_ring = mmap.mmap(descriptors[0], 0)
        self._wake = descriptors[1]
        # Our probe: the bytes at an address of this process.
        probe = struct.pack("<Q", ctypes.addressof(self._source)) + bytes(self._source[:16])
        send(self.socket, b"\1" + probe, [])
        receive(self.socket)
        member.announce(1)

    def write(
        self, key: int, writes: list[tuple[int, int]], imm: int | None, source: int | None = None
    ) -> str:
        """Writes a batch. Returns its status, or "cut off" if the victim closes the connection."""
        self._member.beat()
        at = ctypes.addressof(self._source) if source is None else source
        head = self._produced
        self.put(
            head, struct.pack("<QIIBBHI", key, len(writes), imm or 0, imm is not None, 0, 0, 0)
        )
        for index, (offset, length) in enumerate(writes, 1):
            self.put(head + index, struct.pack("<QQII", at, offset, length, 0))
        self._produced = head + 1 + len(writes)
        self.publish(self._produced)
        give_up = time.monotonic() + PATIENCE
        while self._consumed.value < self._produced:
            if time.monotonic() > give_up:
                raise TimeoutError("the victim did not consume the batch")
            if self._gone():
                return "cut off"
            time.sleep(0.0005)
        slot = _HEAD + head % _SLOTS * _SLOT_BYTES
        return wire.STATUS.get(struct.unpack_from("<H", self._ring, slot + 18)[0], "?")

    def put(self, position: int, slot: bytes) -> None:
        """Puts any bytes into a slot."""
        at = _HEAD + position % _SLOTS * _SLOT_BYTES
        self._ring[at : at + len(slot)] = slot

    def publish(self, produced: int) -> None:
        """Sets the ring's position to any value, and wakes the victim."""
        self._published.value = produced
        os.eventfd_write(self._wake, 1)

    def shared(self) -> int:
        """Returns the memfd of the next region that the victim shares."""
        _, descriptors = receive(self.socket)
        return descriptors[0]

    def _gone(self) -> bool:
        if not select.select([self.socket], [], [], 0)[0]:
            return False
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.socket.close()


def send(unix: socket.socket, data: bytes, descriptors: list[int]) -> None:
    socket.send_fds(unix, [data], descriptors)


def receive(unix: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, descriptors, _, _ = socket.recv_fds(unix, 512, 4)
    except ConnectionError:
        return b"", []
    return data, descriptors


def region_message(kind: int, number: int, size: int) -> bytes:
    """Returns the message that announces a shared region (1) or revokes it (2)."""
    return struct.pack("<IIQ", kind, number, size)
