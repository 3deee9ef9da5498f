"""Memory that is handed over to another process on the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvxfer.errors import PeerLost
from kvxfer.moe.memory_socket import Handed, MemorySocket, give


@pytest.fixture
def taker() -> Iterator[MemorySocket]:
    made = MemorySocket()
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[Handed]:
    memory, doorbell = os.memfd_create("memory"), os.eventfd(0)
    with Handed(memory, doorbell, 64) as handed:
        yield handed


def test_memory_that_is_given_is_taken(taker: MemorySocket, memory: Handed) -> None:
    secret = taker.expect()
    give(taker.name, secret, memory)
    os.write(memory.memory, b"bytes")
    with taker.take(secret) as handed:
        assert os.pread(handed.memory, 5, 0) == b"bytes"
        assert handed.nbytes == 64


def test_nothing_is_taken_without_its_secret(taker: MemorySocket, memory: Handed) -> None:
    secret = taker.expect()
    give(taker.name, bytes(16), memory)
    with pytest.raises(PeerLost, match="has not handed its memory over"):
        taker.take(secret)


def test_a_giver_that_has_only_connected_gives_later(taker: MemorySocket, memory: Handed) -> None:
    first, second = taker.expect(), taker.expect()
    slow = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    slow.connect(f"\0{taker.name}")
    give(taker.name, first, memory)
    with taker.take(first):
        pass
    header = second + (32).to_bytes(8, "little")
    socket.send_fds(slow, [header], [memory.memory, memory.doorbell])
    slow.close()
    with taker.take(second) as handed:
        assert handed.nbytes == 32
