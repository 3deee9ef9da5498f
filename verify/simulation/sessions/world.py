"""The parts of a simulated fleet that all others share: time, chance, the choices of a seed."""

from __future__ import annotations

import collections
import enum
import random
from collections.abc import Callable

from kvxfer.instances import Role
from verify.simulation.clock import Clock

from . import shapes
from .defects import Defects


class Violation(Exception):
    """A promise was broken."""


class Placer(enum.Enum):
    """The part of the receiver that places arrived data."""

    ENGINE = "engine"
    NIC = "NIC"
    GPU = "GPU"


class World:
    """The choices of one seed."""

    def __init__(self, seed: int, defects: Defects, *, trace: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.defects = defects
        self.counts: collections.Counter[str] = collections.Counter()
        self.clock = Clock()
        self.trace: list[str] | None = [] if trace else None
        self.violations: list[str] = []
        self.placer = rng.choice(list(Placer))
        self.group_writes = rng.choice([1, 2, 32])
        self.max_queued = rng.choice([2, 1000, 1000, 1000, 1000])
        self.max_messages = rng.choice([1, 3, 1000, 1000, 1000])
        """The most messages of one end that may be under way."""
        self._seconds = rng.choice([20e-6, 200e-6, 2e-3])
        self.model, self.layouts = shapes.choose(rng)
        self.num_blocks = shapes.num_blocks(rng, self.model)
        self.checksums = rng.choice([None, None, None, Role.PREFILL, Role.DECODE])
        """The side that wants every transfer checked."""
        self.lease_seconds = rng.choice([0.3, 2.0, 5.0])

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def note(self, what: str, of: Callable[[], str]) -> None:
        """Adds a line to the trace. Makes the text only if the trace is on."""
        if self.trace is not None:
            self.trace.append(f"{self.clock.now - 1000:.9f} {what}: {of()}")

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            self.violations.append(text)
            raise Violation(text)

    def latency(self) -> float:
        """Returns the delay of one message or write. A few take much longer."""
        rng = self.rng
        slow = 30 if rng.random() < 0.03 else 1
        return self._seconds * (0.2 + rng.expovariate(1)) * slow

    def posting_delay(self) -> float:
        """Returns the delay until a posted write is read and sent."""
        return self.latency() * self.rng.choice([0, 0, 1, 5])
