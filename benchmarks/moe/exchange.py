"""kvxfer's dispatch and combine."""

from __future__ import annotations

import time

import numpy as np
import torch

from benchmarks.moe.cases import Case, Routes, expert_ids
from benchmarks.moe.way import Times, WrongBytes
from kvxfer.moe import AllToAll


class Exchange:
    """One rank's part of an exchange. The dispatched rows come back unchanged: the experts'
    computation is not measured. By expert, combine sums the rows of one token at either end."""

    def __init__(self, group: AllToAll, case: Case, rank: int, *, by_expert: bool) -> None:
        self._group, self._by_expert = group, by_expert
        self._layout = "experts" if by_expert else "tokens"
        self._x = tokens_of(case, rank)
        self._ids = torch.from_numpy(expert_ids(case, rank))
        self._weights = torch.full((case.tokens, case.top_k), 1 / case.top_k)
        self._out = torch.zeros_like(self._x)
        reached = Routes(case).reached[rank].sum(axis=1, keepdims=True)
        self._wanted = self._x if by_expert else self._x * torch.from_numpy(reached)

    def run(self, rounds: int) -> Times:
        # The place where a layer puts its tokens.
        x = self._group.input(0)[: len(self._x)]
        x.copy_(self._x)
        times = np.empty((rounds, 3), np.int64)
        for at in range(rounds):
            times[at, 0] = time.monotonic_ns()
            self._group.dispatch_send(x, self._ids, self._weights)
            got = self._group.dispatch_recv(layout=self._layout)
            times[at, 1] = time.monotonic_ns()
            self._group.combine_send(got.x)
            self._group.combine_recv(out=self._out)
            times[at, 2] = time.monotonic_ns()
        return times

    def check(self) -> None:
        if not torch.equal(self._out, self._wanted.to(self._out.dtype)):
            raise WrongBytes(f"a row is not the sum of what came back ({self._layout})")
        self._out.zero_()


def tokens_of(case: Case, rank: int) -> torch.Tensor:
    """Returns [tokens, hidden] in bf16. All sums of up to top_k of them are exact."""
    token = torch.arange(case.tokens).unsqueeze(1) + rank * case.tokens
    return ((token * 7 + torch.arange(case.hidden)) % 63 - 31).to(torch.bfloat16)
