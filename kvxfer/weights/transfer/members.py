"""The members of a training job's weight updates, as its coordinator knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvxfer.errors import WeightsMismatch
from kvxfer.weights.transfer.arena import arena_of
from kvxfer.weights.transfer.messages import JoinInference, JoinTraining, Plan, Target, rank_name
from kvxfer.weights.transfer.settings import UpdateSettings
from kvxfer.weights.transfer.waves import Bounded, waves_of

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
        return rank_name(self.joined.instance_id, self.joined.rank)


Member = TrainingRank | InferenceRank


class Standing(NamedTuple):
    """The state of an instance between two updates."""

    state: Literal["aborted", "failed", "lost", "partial", "committed"]
    """The state in the report of an update that it does not apply."""
    version: int | None = None
    """The version that it serves; None if unknown or out of service."""


class Members:
    """The connected members. `generation` rises whenever they change. Event loop only."""

    def __init__(self, trainers: int) -> None:
        self._trainers = trainers
        self._training: dict[int, TrainingRank] = {}
        self._inference: dict[str, dict[int, InferenceRank]] = {}
        self._standing: dict[str, Standing] = {}
        self.generation = 0
        self._changed = asyncio.Event()

    def add(self, peer: Peer, joined: JoinTraining | JoinInference) -> Member | None:
        """Adds a member, and returns the earlier one of the same rank, which it replaces."""
        before: Member | None
        if isinstance(joined, JoinTraining):
            before = self._training.get(joined.rank)
            self._training[joined.rank] = TrainingRank(peer, joined)
        else:
            ranks = self._inference.setdefault(joined.instance_id, {})
            before = ranks.get(joined.rank)
            ranks[joined.rank] = InferenceRank(peer, joined)
            if joined.partial:
                self._standing[joined.instance_id] = Standing("partial")
            elif joined.rank == 0:
                self._standing[joined.instance_id] = Standing("aborted", joined.serves)
        self._change()
        return before

    def note(self, instance_id: str, standing: Standing) -> None:
        """Records the standing in which an update has left an instance."""
        self._standing[instance_id] = standing

    def standing(self, instance_id: str) -> Standing:
        """Returns the standing of an instance whose ranks are all connected."""
        return self._standing[instance_id]

    def remove(self, peer: Peer) -> Member | None:
        """Removes and returns the member of a peer; None if it has none."""
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
        """Yields all connected members, also those of instances that lack a rank."""
        yield from self.training
        for ranks in self._inference.values():
            yield from list(ranks.values())

    @property
    def taking_part(self) -> list[Member]:
        """The members of an update that begins now."""
        return [*self.training, *self.inference]

    @property
    def training(self) -> list[TrainingRank]:
        """The training ranks, in order."""
        return [self._training[rank] for rank in sorted(self._training)]

    @property
    def inference(self) -> list[InferenceRank]:
        """The inference ranks of complete instances, by instance and rank."""
        return [rank for ranks in self.instances.values() for rank in ranks]

    @property
    def instances(self) -> dict[str, list[InferenceRank]]:
        """The instances whose ranks are all connected."""
        found = {}
        for instance_id, ranks in sorted(self._inference.items()):
            of_instance = [ranks[rank] for rank in sorted(ranks)]
            if len(of_instance) == of_instance[0].joined.ranks:
                found[instance_id] = of_instance
        return found

    def missing_trainers(self) -> list[int]:
        return [rank for rank in range(self._trainers) if rank not in self._training]

    def plan(self, plan_id: str, settings: UpdateSettings) -> Plan:
        """Returns the plan of the connected members; `number` is still to be set. Raises
        WeightsMismatch that names a rank that cannot take updates of this mode."""
        waves: tuple[tuple[str, ...], ...] = ()
        if settings.mode == "wave":
            waves = waves_of([_bounded(each) for each in self.inference])
        else:
            for each in self.inference:
                _require_whole(each)
        return Plan(
            plan_id=plan_id,
            number=0,
            train=tuple(each.joined.holdings for each in self.training),
            infer=tuple(each.joined.holdings for each in self.inference),
            targets=tuple(
                Target(each.joined.instance_id, each.joined.rank, each.joined.address)
                for each in self.inference
            ),
            settings=settings.schedule,
            waves=waves,
        )

    def incomplete(self) -> Iterator[str]:
        """Yields which ranks each incomplete instance lacks."""
        for instance_id, ranks in sorted(self._inference.items()):
            of = next(iter(ranks.values())).joined.ranks
            lacking = ", ".join(str(rank) for rank in range(of) if rank not in ranks)
            if lacking:
                yield f"{instance_id!r} has {of} ranks, and lacks {lacking}"

    async def change(self) -> None:
        """Waits until the members change, or for stir()."""
        await self._changed.wait()

    def stir(self) -> None:
        """Ends every change()."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _change(self) -> None:
        self.generation += 1
        self.stir()


def _bounded(rank: InferenceRank) -> Bounded:
    why = ""
    if rank.joined.rank == 0 and not rank.joined.by_message:
        why = "by its engine's control path"
    elif rank.joined.arena_bytes is None:
        why = "without arena_bytes"
    if rank.joined.arena_bytes is None or why:
        raise WeightsMismatch(
            f'{rank.name} takes updates {why}, so it takes only whole ones; use the mode "atomic"'
        )
    return Bounded(rank.name, rank.joined.holdings, rank.joined.arena_bytes)


def _require_whole(rank: InferenceRank) -> None:
    bound, wanted = rank.joined.arena_bytes, arena_of(rank.joined.holdings).nbytes
    if bound is not None and bound < wanted:
        raise WeightsMismatch(
            f"{rank.name} stages {wanted} bytes for a whole update, and its arena_bytes are "
            f'{bound}; use the mode "wave", or raise arena_bytes'
        )
