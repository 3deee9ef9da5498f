"""When each operation goes, and over which NICs.

The operations of a receiver are spread evenly over its time, sender by sender, and receivers begin
at different senders. So at any time a receiver takes from all of its senders, and a sender serves
all of its receivers. A *burst* is as many of them as a receiver has bytes in flight.
"""

from __future__ import annotations

import numpy as np

from kvxfer.weights.plan.boxes import Ints
from kvxfer.weights.plan.operations import Operations


def in_order(operations: Operations, senders: int, receivers: int) -> Ints:
    """The operations by receiver, and of each in the order in which they are begun."""
    sender, receiver = operations.sender, operations.receiver
    pair = sender * receivers + receiver
    by_pair = np.argsort(pair, kind="stable")
    ordered = pair[by_pair]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(pair) else ordered
    counts = np.diff(np.r_[begins, len(pair)])
    position, count = np.empty_like(pair), np.empty_like(pair)
    position[by_pair] = np.arange(len(pair)) - np.repeat(begins, counts)
    count[by_pair] = np.repeat(counts, counts)
    turn = (sender - receiver * senders // receivers) % senders
    when = (position * senders + turn) / (count * senders)
    return np.lexsort((sender, when, receiver))


def by_sender(operations: Operations, order: Ints, bursts: Ints) -> Ints:
    """The operations by sender, and of each burst by burst, in the order of their receivers."""
    receivers = operations.receiver[order]
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - np.searchsorted(receivers, receivers)
    return np.lexsort((operations.receiver, turn, bursts, operations.sender))


def bursts_of(operations: Operations, order: Ints, burst_bytes: int) -> Ints:
    """The burst of each operation: of each burst a receiver gets at most `burst_bytes`."""
    bursts = np.zeros(len(order), np.int64)
    current, burst, taken = -1, 0, 0
    rows = zip(
        order.tolist(),
        operations.receiver[order].tolist(),
        operations.nbytes[order].tolist(),
        strict=True,
    )
    for at, receiver, nbytes in rows:
        if receiver != current:
            current, burst, taken = receiver, 0, 0
        elif taken + nbytes > burst_bytes:
            burst, taken = burst + 1, 0
        taken += nbytes
        bursts[at] = burst
    return bursts


def nics_of(ranks: Ints, nbytes: Ints, order: Ints, nics: int) -> Ints:
    """The NIC of its rank that each operation goes over: the one with the fewest bytes so far."""
    chosen = np.zeros(len(order), np.int64)
    if nics == 1:
        return chosen
    loads: dict[int, list[int]] = {}
    for at, rank, size in zip(
        order.tolist(), ranks[order].tolist(), nbytes[order].tolist(), strict=True
    ):
        of_rank = loads.setdefault(rank, [0] * nics)
        nic = of_rank.index(min(of_rank))
        of_rank[nic] += size
        chosen[at] = nic
    return chosen
