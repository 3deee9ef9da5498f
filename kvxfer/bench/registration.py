"""What it takes until memory can be used by the engine."""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable

import numpy as np

from kvxfer.bench.figures import RegistrationFigure
from kvxfer.bench.pool import anonymous_pool
from kvxfer.engine import Engine


async def measure_registration(
    nbytes: int, rounds: int, advance: Callable[[], None]
) -> RegistrationFigure:
    """Allocates and registers `nbytes` with an engine of its own, `rounds` times."""
    alloc_ns, touched_ns, anonymous_ns, register_ns = [], [], [], []
    async with Engine(cluster_key=secrets.token_bytes(32), name="bench registration") as engine:
        for _ in range(rounds):
            start = time.monotonic_ns()
            memory = engine.alloc(nbytes)
            alloc_ns.append(time.monotonic_ns() - start)
            np.frombuffer(memoryview(memory), np.uint8)[:: mmap.PAGESIZE] = 1
            touched_ns.append(time.monotonic_ns() - start)
            memory.close()

            start = time.monotonic_ns()
            pool = anonymous_pool(nbytes)
            anonymous_ns.append(time.monotonic_ns() - start)

            start = time.monotonic_ns()
            region = engine.register(pool)
            register_ns.append(time.monotonic_ns() - start)
            region.close()
            advance()
    return RegistrationFigure(
        nbytes=nbytes,
        alloc_ns=float(np.median(alloc_ns)),
        touched_ns=float(np.median(touched_ns)),
        anonymous_touched_ns=float(np.median(anonymous_ns)),
        register_ns=float(np.median(register_ns)),
    )
