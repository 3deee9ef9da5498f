"""The parts of a simulated group that all others share: time, chance, the network, the counts."""

from __future__ import annotations

import collections
import hashlib
import random
from collections.abc import Callable
from typing import Any, Final

from kvxfer.moe.view_messages import Flush, View
from verify.simulation.clock import Clock

from .defects import Defects
from .network import Connection, Network, Process

ORDERS: Final = {
    "one step": ((0, "srcw"),),
    "next dispatch first": ((1, "s"), (0, "rcw")),
    "next dispatch within": ((0, "rc"), (1, "s"), (0, "w")),
}
"""The calls of each turn, as (step relative to the received one, calls). s: dispatch_send,
r: dispatch_recv, c: combine_send, w: combine_recv."""


class Violation(Exception):
    """A promise was broken."""


class World:
    """The choices of one seed, and the processes."""

    def __init__(self, seed: int, defects: Defects, *, traced: bool) -> None:
        self.random = random.Random(seed)
        self.defects = defects
        self.clock = Clock()
        self.network = Network(self.clock, self.random)
        self.counts: collections.Counter[str] = collections.Counter()
        self.traced, self.lines = traced, list[str]()
        self.digest = hashlib.sha256()
        self.size = self.random.choice((2, 3, 4, 4, 5, 6, 7, 8))
        self.order = self.random.choice(list(ORDERS))
        most = self.size // 2 + 1
        self.min_ranks = self.random.choice((1, 1, most))
        self.compute_most = self.random.choice((0.05, 0.1, 0.3))
        self.touched: set[int] = set()
        """The ranks that had a fault."""
        self.of_sender: Callable[[Process, View | Flush], None] | None = None
        self.starts = [0] * self.size
        self.ranks: list[Process] = []
        """The present process of each rank."""
        self.first: list[Process] = []

    def connect(self, one: Process, other: Process, *, local: bool) -> None:
        connection = Connection(self.network, one, other, local)
        for side in (one, other):
            peer = connection.other(side)
            side.connections[peer.rank] = connection
            side.addresses[peer.rank] = peer
            side.exchange.set_up(peer.rank)

    def compute_seconds(self) -> float:
        if self.random.random() < 0.01:
            return self.random.uniform(0.2, 1.2)
        return self.random.uniform(0.0005, self.compute_most)

    def count(self, what: str, times: int = 1) -> None:
        self.counts[what] += times

    def trace(self, rank: Process, text: str) -> None:
        line = f"{self.clock.now:.6f} {rank.name}: {text}"
        self.digest.update(line.encode())
        if self.traced:
            self.lines.append(line)

    def fate_of_sender(self, rank: Process, message: Any) -> None:
        if self.of_sender is not None:
            self.of_sender(rank, message)
