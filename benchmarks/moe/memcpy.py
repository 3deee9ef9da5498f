"""One memcpy for each row that the exchange moves. All ranks copy at once, each in its process."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.moe.cases import Routes
from benchmarks.moe.way import Times, WrongBytes
from kvxfer import _probes
from kvxfer.bench.pool import anonymous_pool


def shared_rows(routes: Routes) -> NDArray[np.uint8]:
    """Makes the source of all ranks' copies, with as many bytes as the exchange reads. Processes
    that are forked later share it as long as none writes."""
    rows = max(routes.case.ranks * routes.case.tokens, int(routes.rows.sum()))
    memory = anonymous_pool(rows * routes.case.row_bytes)
    memory.view(np.uint16).reshape(rows, -1)[:] = _marks(np.arange(rows))
    return memory


class Memcpy:
    """The copies of one rank's rows into its memory."""

    def __init__(self, routes: Routes, rank: int, shared: NDArray[np.uint8]) -> None:
        self._row = routes.case.row_bytes
        self._shared = shared
        self._lists = (routes.dispatched(rank), routes.combined(rank))
        self._pools = tuple(anonymous_pool(len(rows) * self._row) for rows in self._lists)

    def run(self, rounds: int) -> Times:
        """Copies. The ranks do not wait for each other, so all rounds have one row of times."""
        times = [time.monotonic_ns()]
        for rows, pool in zip(self._lists, self._pools, strict=True):
            places = np.arange(len(rows))
            for _ in range(rounds):
                _probes.copy_pages(self._shared, rows, pool, places, self._row)
            times.append(time.monotonic_ns())
        return np.array([times])

    def check(self) -> None:
        for rows, pool in zip(self._lists, self._pools, strict=True):
            if not (pool.view(np.uint16).reshape(len(rows), -1) == _marks(rows)).all():
                raise WrongBytes("a row is not as memcpy has copied it")


def _marks(rows: NDArray[np.int64]) -> NDArray[np.uint16]:
    return rows.astype(np.uint16)[:, None]
