"""The writes of one weight update: a pure function of the weight map, equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from kvxfer.weights.maps import WeightMap
from kvxfer.weights.plan.balance import loads_of, near_of
from kvxfer.weights.plan.boxes import Ints
from kvxfer.weights.plan.bursts import bursts_of, by_sender, in_order, nics_of
from kvxfer.weights.plan.demands import Demands, demands_of
from kvxfer.weights.plan.figures import Figures, figures_of
from kvxfer.weights.plan.operations import Operations, operations_of
from kvxfer.weights.plan.settings import ScheduleSettings


class Piece(msgspec.Struct, frozen=True):
    """A box of a parameter; lengths and offsets are elements along each dimension."""

    parameter: str
    """The name at inference."""
    source: str
    """The name at training, which differs if parameters are tied."""
    offset: tuple[int, ...]
    """The offset in the whole parameter."""
    shape: tuple[int, ...]
    source_offset: tuple[int, ...]
    """The offset in the box that the sender has."""
    target_offset: tuple[int, ...]
    """The offset in the box that the receiver wants."""


class Write(msgspec.Struct, frozen=True):
    """The pieces that one training rank writes to one inference rank at once."""

    sender: int
    receiver: int
    burst: int
    """The number of its burst; a sender writes to a receiver burst by burst."""
    sender_nic: int
    receiver_nic: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The writes of an update. Equal maps and settings give equal schedules. Made by
    plan_weights()."""

    weights: WeightMap
    demands: Demands
    operations: Operations
    burst: Ints
    sender_nic: Ints
    receiver_nic: Ints
    order: Ints
    """The operations, sorted by sender and then by the order in which it begins them."""
    figures: Figures

    def writes_of(self, sender: int) -> Iterator[Write]:
        """Yields the writes of one training rank, in the order in which it begins them."""
        ordered = self.operations.sender[self.order]
        first, end = np.searchsorted(ordered, [sender, sender + 1]).tolist()
        return self._writes(self.order[first:end])

    def writes_to(self, receiver: int) -> Iterator[Write]:
        """Yields the writes to one inference rank, sender by sender."""
        return self._writes(self.order[self.operations.receiver[self.order] == receiver])

    def _writes(self, rows: Ints) -> Iterator[Write]:
        for at in rows.tolist():
            sender = int(self.operations.sender[at])
            yield Write(
                sender=sender,
                receiver=int(self.operations.receiver[at]),
                burst=int(self.burst[at]),
                sender_nic=int(self.sender_nic[at]),
                receiver_nic=int(self.receiver_nic[at]),
                nbytes=int(self.operations.nbytes[at]),
                pieces=tuple(self._pieces(at, sender)),
            )

    def _pieces(self, at: int, sender: int) -> Iterator[Piece]:
        operations, demands = self.operations, self.demands
        receiver = int(operations.receiver[at])
        for row in range(int(operations.first_piece[at]), int(operations.first_piece[at + 1])):
            demand = int(operations.piece_demand[row])
            made, of = operations.cuts[demand], demands.classes[int(demands.of_class[demand])]
            for unit in range(int(operations.piece_first[row]), int(operations.piece_end[row])):
                box = made.box(unit % made.slices, demands.box[demand])
                first = box[:, 0]
                yield Piece(
                    parameter=of.names[unit // made.slices],
                    source=of.sources[unit // made.slices],
                    offset=tuple(first.tolist()),
                    shape=tuple((box[:, 1] - first).tolist()),
                    source_offset=tuple((first - of.held.whole[sender][:, 0]).tolist()),
                    target_offset=tuple((first - of.wanted.whole[receiver][:, 0]).tolist()),
                )


def plan_weights(
    weights: WeightMap,
    settings: ScheduleSettings | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> Schedule:
    """Plans an update: every wanted element comes from exactly one training rank that holds it.

    stage: called with a description of each stage before it begins.
    Raises InvalidArgument that names the parameter that cannot be mapped, and why.
    """
    settings = settings or ScheduleSettings()
    train, infer = weights.train, weights.infer
    stage("matching parameters")
    demands = demands_of(weights)
    stage("choosing senders")
    operations = operations_of(
        demands,
        train.ranks,
        slice_bytes=settings.slice_bytes,
        gather_bytes=settings.gather_bytes,
        near=near_of(train, infer),
    )
    stage("ordering writes")
    by_receiver = in_order(operations, train.ranks, infer.ranks)
    burst = bursts_of(operations, by_receiver, settings.burst_bytes)
    order = by_sender(operations, by_receiver, burst)
    sender_nic = nics_of(operations.sender, operations.nbytes, order, train.nics)
    receiver_nic = nics_of(operations.receiver, operations.nbytes, by_receiver, infer.nics)
    stage("adding up")
    figures = figures_of(
        demands,
        operations,
        bursts=int(burst.max(initial=-1)) + 1,
        sender_nics=loads_of(
            operations.sender * train.nics + sender_nic, operations.nbytes, train.ranks * train.nics
        ),
        receiver_nics=loads_of(
            operations.receiver * infer.nics + receiver_nic,
            operations.nbytes,
            infer.ranks * infer.nics,
        ),
        train_ranks=train.ranks,
        infer_ranks=infer.ranks,
    )
    return Schedule(weights, demands, operations, burst, sender_nic, receiver_nic, order, figures)
