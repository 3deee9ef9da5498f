"""torch.distributed.all_to_all_single on gloo, with as many rows as the exchange moves."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.moe.cases import Routes
from benchmarks.moe.way import Times, WrongBytes


class Gloo:
    """One rank's part of gloo's exchange. The rows for each rank are packed before the first round.
    Neither the packing nor the sum of the returned rows is measured."""

    def __init__(self, routes: Routes, rank: int, x: torch.Tensor) -> None:
        self._sent_rows = routes.rows[rank].tolist()
        self._received_rows = routes.rows[:, rank].tolist()
        # gloo does not support every dtype.
        self._packed = x[torch.from_numpy(routes.sent(rank))].view(torch.uint8)
        width = self._packed.shape[1]
        self._received = torch.zeros(sum(self._received_rows), width, dtype=torch.uint8)
        self._back = torch.zeros_like(self._packed)

    def run(self, rounds: int) -> Times:
        times = np.empty((rounds, 3), np.int64)
        for at in range(rounds):
            times[at, 0] = time.monotonic_ns()
            dist.all_to_all_single(
                self._received, self._packed, self._received_rows, self._sent_rows
            )
            times[at, 1] = time.monotonic_ns()
            dist.all_to_all_single(self._back, self._received, self._sent_rows, self._received_rows)
            times[at, 2] = time.monotonic_ns()
        return times

    def check(self) -> None:
        if not torch.equal(self._back, self._packed):
            raise WrongBytes("a row is not as gloo has sent it")
