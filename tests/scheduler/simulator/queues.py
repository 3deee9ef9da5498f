"""Queues whose waits are known, and the same queues as simulated fleets."""

from __future__ import annotations

import heapq
import math
from typing import Final

import numpy as np

from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.simulator.policies import Policy
from kvxfer.scheduler.simulator.run import Simulation, simulate
from kvxfer.scheduler.simulator.tally import Results
from kvxfer.scheduler.simulator.workload import Arrivals, RecordedRequests

# Long waits come in series: 40,000 requests of one draw are up to 15 % off the mean of many draws.
_SEED: Final = 4


def erlang_c(servers: int, offered: float) -> float:
    """Returns the share of arrivals that wait in an M/M/c queue at `offered` Erlangs."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


def waits_in_one_queue(workload: RecordedRequests, servers: int, per_token: float) -> list[float]:
    """Returns each request's wait when the first request in the queue takes the first free server:
    Kiefer and Wolfowitz's recursion."""
    (arrivals,) = workload.between(0.0, workload.seconds)
    free = [0.0] * servers
    waits = []
    for at, tokens in zip(arrivals.at.tolist(), arrivals.output.tolist(), strict=True):
        begins = max(at, heapq.heappop(free))
        waits.append(begins - at)
        heapq.heappush(free, begins + tokens * per_token)
    return waits


# The mean wait, in service times, of arrivals that join the shorter of two M/M/1 queues at 80 % of
# capacity: from the stationary state of the Markov chain of both lengths, up to 60 each.
SHORTER_OF_TWO: Final = 1.956


def requests(
    rate: float, count: int, *, prompt: float, output: float, fixed: bool = False
) -> RecordedRequests:
    """Returns Poisson arrivals with exponential lengths, or fixed ones."""
    draw = np.random.default_rng(_SEED)
    at = np.cumsum(draw.exponential(1 / rate, count))

    def lengths(mean: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        drawn = np.full(count, mean) if fixed or mean == 1 else draw.exponential(mean, count)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)

    arrivals = Arrivals(at, lengths(prompt), lengths(output))
    return RecordedRequests("queue", arrivals, tokens_per_hash=None)


def simulated(
    workload: RecordedRequests, model: WorkerModel, *, prefill: int, decode: int
) -> Results:
    """Simulates a fleet in which no heartbeat adds to what the registry knows."""
    simulation = Simulation(workload=workload, model=model, detail=10**9, heartbeat_seconds=1e9)
    return simulate(simulation, Policy("queue", prefill, decode))
