"""The members of a training job's weight updates, as its coordinator knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvxfer.weights.plan.settings import ScheduleSettings
from kvxfer.weights.transfer.messages import JoinInference, JoinTraining, Plan, Target

if TYPE_CHECKING:
    from kvxfer.engine import Peer


class TrainingRank(NamedTuple):
    peer: Peer
    joined: JoinTraining

    @property
    def name(self) -> str:
        return f"training rank {self.joined.rank}"


class InferenceRank(NamedTuple):
    peer: Peer
    joined: JoinInference

    @property
    def name(self) -> str:
        if self.joined.ranks == 1:
            return f"{self.joined.instance_id!r}"
        return f"rank {self.joined.rank} of {self.joined.instance_id!r}"


Member = TrainingRank | InferenceRank


class Members:
    """Those that are connected. `generation` rises whenever they change. Event loop only."""

    def __init__(self, trainers: int) -> None:
        self._trainers = trainers
        self._training: dict[int, TrainingRank] = {}
        self._inference: dict[str, dict[int, InferenceRank]] = {}
        self.generation = 0
        self._changed = asyncio.Event()

    def add(self, peer: Peer, joined: JoinTraining | JoinInference) -> Member | None:
        """The earlier one of the same rank, which it takes the place of."""
        before: Member | None
        if isinstance(joined, JoinTraining):
            before = self._training.get(joined.rank)
            self._training[joined.rank] = TrainingRank(peer, joined)
        else:
            ranks = self._inference.setdefault(joined.instance_id, {})
            before = ranks.get(joined.rank)
            ranks[joined.rank] = InferenceRank(peer, joined)
        self._change()
        return before

    def remove(self, peer: Peer) -> Member | None:
        """The member that the peer was."""
        found = self.of(peer)
        if isinstance(found, TrainingRank):
            del self._training[found.joined.rank]
        elif found is not None:
            ranks = self._inference[found.joined.instance_id]
            del ranks[found.joined.rank]
            if not ranks:
                del self._inference[found.joined.instance_id]
        if found is not None:
            self._change()
        return found

    def of(self, peer: Peer) -> Member | None:
        return next((each for each in self if each.peer is peer), None)

    def __iter__(self) -> Iterator[Member]:
        """All that are connected, also those of instances that lack a rank."""
        yield from self.training
        for ranks in self._inference.values():
            yield from list(ranks.values())

    @property
    def taking_part(self) -> list[Member]:
        """In an update that begins now."""
        return [*self.training, *self.inference]

    @property
    def training(self) -> list[TrainingRank]:
        """By rank."""
        return [self._training[rank] for rank in sorted(self._training)]

    @property
    def inference(self) -> list[InferenceRank]:
        """Of whole instances, by instance and rank."""
        return [rank for ranks in self.instances.values() for rank in ranks]

    @property
    def instances(self) -> dict[str, list[InferenceRank]]:
        """Those with all of their ranks."""
        found = {}
        for instance_id, ranks in sorted(self._inference.items()):
            of_instance = [ranks[rank] for rank in sorted(ranks)]
            if len(of_instance) == of_instance[0].joined.ranks:
                found[instance_id] = of_instance
        return found

    def missing_trainers(self) -> list[int]:
        return [rank for rank in range(self._trainers) if rank not in self._training]

    def plan(self, plan_id: str, settings: ScheduleSettings) -> Plan:
        """Of those that are here; `number` is still to be set."""
        return Plan(
            plan_id=plan_id,
            number=0,
            train=tuple(each.joined.holdings for each in self.training),
            infer=tuple(each.joined.holdings for each in self.inference),
            targets=tuple(
                Target(each.joined.instance_id, each.joined.rank, each.joined.address)
                for each in self.inference
            ),
            settings=settings,
        )

    async def change(self) -> None:
        """Returns when the members have changed."""
        await self._changed.wait()

    def _change(self) -> None:
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()
