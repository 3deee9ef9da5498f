"""Measures how long 4 KiB take from the call that writes them until the other process' counter
shows them, with engines that are polled: the median of there and back, halved. `latency` in
examples/native measures the same in C++.

    python examples/python/latency.py [ROUNDS]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

from kvxfer import Peer, PolledEngine

BYTES = 4096
WARM_UP = 500
TIMEOUT = 10.0


class FirstPeer:
    """A handler that waits for one peer."""

    def __init__(self) -> None:
        self.peer: Peer | None = None

    def peer_up(self, peer: Peer) -> None:
        self.peer = peer

    def message(self, peer: Peer, data: bytes) -> None: ...

    def peer_lost(self, peer: Peer, error: Exception) -> None: ...


def one_side(fabric: str, other: Connection, parent: bool, rounds: int) -> float:
    """Returns the median one-way seconds, in the parent; the child answers."""
    with PolledEngine(cluster_key="only for this measurement", fabrics=[fabric]) as engine:
        first = engine.handler = FirstPeer()
        source, target, counter = engine.alloc(BYTES), engine.alloc(BYTES), engine.counter()
        other.send(engine.address)
        their_address = other.recv()
        if parent:
            engine.connect(their_address, TIMEOUT)
        engine.poll_until(lambda: first.peer is not None, TIMEOUT)
        peer = first.peer
        assert peer is not None
        other.send((target.region.descriptor, counter.imm))
        destination, imm = other.recv()

        took = []
        for n in range(1, WARM_UP + rounds + 1):
            if not parent:
                engine.poll_counter(counter, n, TIMEOUT)
            began = time.perf_counter()
            peer.write(source.region, destination, length=BYTES, imm=imm)
            if parent:
                engine.poll_counter(counter, n, TIMEOUT)
                took.append((time.perf_counter() - began) / 2)
            engine.poll()  # takes the write's completion
        # Neither closes while the other needs it.
        other.send("done")
        engine.poll_until(other.poll, TIMEOUT)
        other.recv()
        return statistics.median(took[WARM_UP:]) if parent else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Latency of engines that are polled")
    parser.add_argument("rounds", type=int, nargs="?", default=5000)
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"rounds is {rounds}; pass a number above 0")
    ours, theirs = multiprocessing.Pipe()
    for fabric in ("local", "tcp"):
        child = multiprocessing.get_context("fork").Process(
            target=one_side, args=(fabric, theirs, False, rounds)
        )
        child.start()
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(child.pid or 0, cpus[-1:])
        seconds = one_side(fabric, ours, True, rounds)
        child.join()
        print(f"{fabric:6s}  {seconds * 1e6:7.2f} us")


if __name__ == "__main__":
    main()
