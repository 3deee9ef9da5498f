"""The order of operations, and the NICs that they use.

A receiver's operations from each sender are spread evenly over its time, and receivers begin at
different senders. At any time a receiver therefore takes from all of its senders, and a sender
serves all of its receivers. A *burst* is a run of a receiver's operations with at most
`burst_bytes`.
"""

from __future__ import annotations

import numpy as np

from kvxfer.weights.plan.boxes import Ints
from kvxfer.weights.plan.operations import Operations


def in_order(operations: Operations, senders: int, receivers: int) -> Ints:
    """Returns the operations, sorted by receiver and then by the order in which they begin."""
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
    """Returns the operations, sorted by sender, burst, and position in the receiver's order."""
    receivers = operations.receiver[order]
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order)) - np.searchsorted(receivers, receivers)
    return np.lexsort((operations.receiver, turn, bursts, operations.sender))


def bursts_of(operations: Operations, order: Ints, burst_bytes: int) -> Ints:
    """Returns the burst of each operation. A receiver gets at most `burst_bytes` in a burst."""
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
    """Returns each operation's NIC: the one of its rank with the fewest bytes so far."""
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
