"""The figures of a schedule: bytes, writes, and how evenly they are spread."""

from __future__ import annotations

import msgspec

from kvxfer.weights.plan.balance import loads_of
from kvxfer.weights.plan.boxes import Ints
from kvxfer.weights.plan.demands import Demands
from kvxfer.weights.plan.operations import Operations


class Spread(msgspec.Struct, frozen=True):
    """Bytes of each rank, or of each NIC."""

    least: int
    mean: float
    most: int

    @property
    def balance(self) -> float:
        """The largest divided by the mean; 1 if there are no bytes."""
        return self.most / self.mean if self.mean else 1.0


class Figures(msgspec.Struct, frozen=True):
    """The figures of one schedule."""

    parameters: int
    """Parameters that are sent, each counted once."""
    unwanted: int
    """Parameters that training holds, and that no inference rank wants."""
    nbytes: int
    """Bytes on the wire, replicas at inference included."""
    padding_bytes: int
    """Bytes of padding at inference ranks, which are not sent."""
    writes: int
    largest_write: int
    """Bytes of the largest write."""
    gathered: int
    """Writes that have several pieces."""
    pieces: int
    bursts: int
    senders: Spread
    receivers: Spread
    sender_nics: Spread
    receiver_nics: Spread

    def seconds(self, gbps: float) -> float:
        """Returns the seconds that the busiest NIC needs for its bytes, at `gbps` 10^9 bit/s."""
        return max(self.sender_nics.most, self.receiver_nics.most) * 8 / (gbps * 1e9)


def figures_of(
    demands: Demands,
    operations: Operations,
    *,
    bursts: int,
    sender_nics: Ints,
    receiver_nics: Ints,
    train_ranks: int,
    infer_ranks: int,
) -> Figures:
    """Computes the figures; `sender_nics` and `receiver_nics` are the bytes of each NIC."""
    pieces = operations.piece_end - operations.piece_first
    of_write = _sums(pieces, operations.first_piece)
    return Figures(
        parameters=len({name for each in demands.classes for name in each.names}),
        unwanted=len(demands.unwanted),
        nbytes=int(operations.nbytes.sum()),
        padding_bytes=demands.padding_bytes,
        writes=len(operations.sender),
        largest_write=int(operations.nbytes.max(initial=0)),
        gathered=int((of_write > 1).sum()),
        pieces=int(pieces.sum()),
        bursts=bursts,
        senders=spread(loads_of(operations.sender, operations.nbytes, train_ranks)),
        receivers=spread(loads_of(operations.receiver, operations.nbytes, infer_ranks)),
        sender_nics=spread(sender_nics),
        receiver_nics=spread(receiver_nics),
    )


def spread(loads: Ints) -> Spread:
    """Returns the spread of the bytes of each rank or NIC."""
    return Spread(int(loads.min()), float(loads.mean()), int(loads.max()))


def _sums(values: Ints, first: Ints) -> Ints:
    """Returns the sum of each range `first[i]:first[i + 1]` of `values`."""
    total = values.cumsum()
    return (total[first[1:] - 1] - total[first[:-1]] + values[first[:-1]]) if len(values) else total
