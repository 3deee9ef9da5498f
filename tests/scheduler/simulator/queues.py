"""Queues whose waits are known, and the same queues as simulated fleets."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.simulator.policies import Policy
from kvxfer.scheduler.simulator.run import Simulation, simulate
from kvxfer.scheduler.simulator.tally import Results
from kvxfer.scheduler.simulator.workload import Arrivals, RecordedRequests


def erlang_c(servers: int, offered: float) -> float:
    """The part of the arrivals that wait in an M/M/c queue with so many Erlangs."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


# The mean wait, in service times, of arrivals that join the shorter of two M/M/1 queues which are
# used to 80 %: from the stationary state of the Markov chain of both lengths, up to 60 each.
SHORTER_OF_TWO: Final = 1.956


def requests(
    rate: float, count: int, *, prompt: float, output: float, fixed: bool = False
) -> RecordedRequests:
    """Poisson arrivals with exponential lengths, or fixed ones."""
    draw = np.random.default_rng(7)
    at = np.cumsum(draw.exponential(1 / rate, count))

    def lengths(mean: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        drawn = np.full(count, mean) if fixed or mean == 1 else draw.exponential(mean, count)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)

    arrivals = Arrivals(at, lengths(prompt), lengths(output))
    return RecordedRequests("queue", arrivals, tokens_per_hash=None)


def simulated(
    workload: RecordedRequests, model: WorkerModel, *, prefill: int, decode: int
) -> Results:
    """Where nobody is given up, and no heartbeat tells what the registry does not know by itself."""
    simulation = Simulation(workload=workload, model=model, detail=10**9, heartbeat_seconds=1e9)
    return simulate(simulation, Policy("queue", prefill, decode))
