"""Attacks by a process that knows the cluster key: writes without a grant, broken rings."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from . import wire
from .attack import Attack, Tried
from .hostile import Member, TcpWriter, closed
from .local_writer import LocalWriter, region_message, send
from .pair import Pair
from .worker import GRANT_BYTES, KEY

_MANY: Final = 200
_FALLOC_PUNCH: Final = 3  # keep size, punch hole


class Writer(Protocol):
    def write(self, key: int, writes: list[tuple[int, int]], imm: int | None) -> str: ...
    def close(self) -> None: ...


@contextlib.contextmanager
def joined(pair: Pair, name: str) -> Iterator[tuple[Member, Writer]]:
    """Connects a hostile peer to decode, over the fabric of the pair."""
    with Member(pair.decode.target, KEY, name=name) as member:
        writer: Writer = TcpWriter(member) if pair.fabric == "tcp" else LocalWriter(member)
        peers = int(pair.decode.state()["stats"]["peers"])
        give_up = time.monotonic() + 10
        while peers < 2 and time.monotonic() < give_up:
            time.sleep(0.005)
            peers = int(pair.decode.state()["stats"]["peers"])
        try:
            yield member, writer
        finally:
            writer.close()


def foreign_keys(pair: Pair, rng: random.Random) -> Tried:
    with joined(pair, "guesser") as (_, writer):
        said = [writer.write(rng.getrandbits(64), [(0, 64)], None) for _ in range(_MANY)]
    return Tried(_MANY, said.count("unknown-region"), frozenset(said))


def outside_of_a_grant(pair: Pair, rng: random.Random) -> Tried:
    """Writes around and far beyond a granted range, also where offset + length overflows 64
    bits."""
    with joined(pair, "stretcher") as (_, writer):
        grant = pair.decode.ask("grant", peer="stretcher")
        key, imm = grant["key"], grant["imm"]
        shapes: list[Callable[[], list[tuple[int, int]]]] = [
            lambda: [(GRANT_BYTES, 1)],
            lambda: [(GRANT_BYTES - 8, 9)],
            lambda: [(2**64 - 8, 16)],
            lambda: [(2**64 - rng.randint(1, 4096), rng.randint(1, 4096))],
            lambda: [(2**63, 64)],
            lambda: [(rng.randrange(GRANT_BYTES, 2**64), rng.randint(1, 4096))],
            lambda: [(GRANT_BYTES + 64, 0), (2**64 - 1, 1)],
            lambda: [(GRANT_BYTES, 64)] * 16,
        ]
        said = [writer.write(key, shapes[index % 8](), imm) for index in range(_MANY)]
        counts = pair.decode.state()["counts"]
    refused = said.count("out-of-bounds") if counts[grant["counter"]] == 0 else 0
    pair.decode.ask("release", counter=grant["counter"])
    return Tried(_MANY, refused, frozenset(said))


def grants_of_others(pair: Pair, _: random.Random) -> Tried:
    """Writes under another peer's grant whose key and immediate have leaked, with and without the
    immediate."""
    with joined(pair, "owner"), Member(pair.decode.target, KEY, name="thief") as member:
        writer: Writer = TcpWriter(member) if pair.fabric == "tcp" else LocalWriter(member)
        grant = pair.decode.ask("grant", peer="owner")
        imms = (grant["imm"], None)
        said = [writer.write(grant["key"], [(0, 64)], imms[i % 2]) for i in range(_MANY)]
        counts = pair.decode.state()["counts"]
        writer.close()
    pair.decode.ask("release", counter=grant["counter"])
    refused = sum(status in ("stale-counter", "unknown-region") for status in said)
    return Tried(_MANY, refused if counts[grant["counter"]] == 0 else 0, frozenset(said))


def stale_counters(pair: Pair, rng: random.Random) -> Tried:
    """Writes with immediates of released counters, of future generations, of unused slots, and of
    another peer's live counter."""
    with joined(pair, "owner"), Member(pair.decode.target, KEY, name="late") as member:
        writer: Writer = TcpWriter(member) if pair.fabric == "tcp" else LocalWriter(member)
        live = pair.decode.ask("grant", peer="owner")
        old = pair.decode.ask("grant", peer="owner")
        pair.decode.ask("release", counter=old["counter"])
        imm = int(live["imm"])
        tries = [
            lambda: old["imm"],
            lambda: imm + (1 << 16),
            lambda: (imm - (1 << 16)) % 2**32,
            lambda: imm,
            lambda: rng.getrandbits(32) | 0x8000_0000,
        ]
        said = [
            writer.write(live["key"] if i % 2 else 0, [(0, 0 if i % 2 else 64)], tries[i % 5]())
            for i in range(_MANY)
        ]
        counts = pair.decode.state()["counts"]
        writer.close()
    pair.decode.ask("release", counter=live["counter"])
    refused = said.count("stale-counter") if counts[live["counter"]] == 0 else 0
    return Tried(_MANY, refused, frozenset(said))


def malformed_batches(pair: Pair, rng: random.Random) -> Tried:
    """Sends batches that no engine sends: each costs the hostile peer its connection."""
    key = int(pair.decode.ask("grant", peer=None)["imm"])  # the key of no region
    if pair.fabric == "tcp":
        frames = [
            wire.writes_frame(key, [(0, 2**32 - 1)], None),
            wire.writes_frame(key, [(0, 2**32 - 1)] * 1022, None),
            wire.writes_frame(key, [(0, 8)], None, count=0),
            wire.writes_frame(key, [(0, 8)], None, count=2**32 - 1),
            b"\x07" + rng.randbytes(39),
            struct.pack("<BBHIQ24x", wire.ACK, 0, 0, 0, 2**64 - 1),
        ]
        return _cut_off(pair, [lambda writer, f=each: writer.lane.sendall(f) for each in frames])

    def ring(produced: int, *heads: bytes) -> Callable[[Any], None]:
        def act(writer: LocalWriter) -> None:
            for at, head in enumerate(heads):
                writer.put(at, head)
            writer.publish(produced)

        return act

    def head(count: int) -> bytes:
        return struct.pack("<QIIBBHI", key, count, 0, 0, 0, 0, 0)

    return _cut_off(
        pair,
        [
            ring(2**63),
            ring(20_000),
            ring(2, head(0)),
            ring(2, head(5)),
            ring(5000, head(4000)),
            ring(3, head(2**32 - 1)),
            ring(2, head(1), struct.pack("<QQII", 0, 0, 2**32 - 1, 0)),
            lambda writer: send(writer.socket, b"nonsense", []),
            lambda writer: send(writer.socket, region_message(1, 0, 1 << 40), [_unsealed()]),
        ],
    )


def _cut_off(pair: Pair, acts: list[Callable[[Any], None]]) -> Tried:
    refused = 0
    for index, act in enumerate(acts):
        with joined(pair, f"broken {index}") as (member, writer):
            with contextlib.suppress(ConnectionError):
                act(writer)
            refused += closed(member.control)
    return Tried(len(acts), refused)


def _unsealed() -> int:
    """Returns a file that could shrink while the victim reads it."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    return fd


def shared_memory(pair: Pair, _: random.Random) -> Tried:
    """Tries to change the memory that the victim has shared to send from."""
    with Member(pair.decode.target, KEY, name="mapper") as member:
        writer = LocalWriter(member)
        writer.write(0, [(0, 8)], None)
        pair.decode.ask("push", peer="mapper")
        fd = writer.shared()
        again = f"/proc/self/fd/{fd}"
        acts: list[Callable[[], object]] = [
            lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
            lambda: os.pwrite(fd, b"\xee" * 64, 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 1 << 40),
            lambda: os.pwrite(os.open(again, os.O_RDWR), b"\xee" * 64, 0),
            lambda: mmap.mmap(os.open(again, os.O_RDWR), 4096, mmap.MAP_SHARED),
            lambda: fcntl.fcntl(fd, 1033, 8),  # F_ADD_SEALS: it would stop the owner from writing
            lambda: _punch(fd),
        ]
        refused = 0
        for act in acts:
            try:
                act()
            except OSError:
                refused += 1
        writer.close()
    return Tried(len(acts), refused)


def _punch(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_long(4096)
    if libc.fallocate(fd, _FALLOC_PUNCH, ctypes.c_long(0), size) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


_WRITE: Final = "write"

ATTACKS: Final = (
    Attack(
        "key holder: guessed region keys", "decode", (_WRITE, ("unknown-region",)), foreign_keys
    ),
    Attack(
        "key holder: outside of its grant",
        "decode",
        (_WRITE, ("out-of-bounds",)),
        outside_of_a_grant,
    ),
    Attack(
        "key holder: a grant of another peer",
        "decode",
        (_WRITE, ("stale-counter", "unknown-region")),
        grants_of_others,
    ),
    Attack(
        "key holder: counters stale or of others",
        "decode",
        (_WRITE, ("stale-counter",)),
        stale_counters,
    ),
    Attack(
        "key holder: malformed batches and rings",
        "decode",
        ("peer", ("protocol-error",)),
        malformed_batches,
    ),
    Attack(
        "key holder: writing to memory shared for reading",
        "decode",
        None,
        shared_memory,
        fabrics=("local",),
    ),
)
