"""A training job and its instances, in one process: engines, senders, receivers, a coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvxfer.engine import Engine
from kvxfer.layout import ITEM_BYTES
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.transfer.coordinator import WeightCoordinator
from kvxfer.weights.transfer.execution import ControlPath
from kvxfer.weights.transfer.links import Links
from kvxfer.weights.transfer.receiver import WeightReceiver
from kvxfer.weights.transfer.registrar import Registrar
from kvxfer.weights.transfer.sender import WeightSender
from kvxfer.weights.transfer.settings import UpdateSettings
from kvxfer.weights.transfer.staged import Staged
from verify.polling import eventually

KEY = "k" * 32
_VIEWS: Final[dict[int, type]] = {4: np.float32, 2: np.uint16, 1: np.uint8}
SHAPES = {"embed": (96, 40), "norm": (40,), "q_proj": (64, 40), "down": (40, 72)}


def weights(version: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    """Returns all parameters of a version, float32."""
    random = np.random.default_rng(version)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def shards(
    number: int, of: int, dimension: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> Holdings:
    """Returns the holdings of rank `number` of `of`: each parameter is split along a dimension as
    torch.chunk does."""
    found = []
    for name, shape in shapes.items():
        along = min(dimension, len(shape) - 1)
        length = -(-shape[along] // of)
        first = min(number * length, shape[along])
        size = min(length, shape[along] - first)
        if size:
            offset = [0] * len(shape)
            offset[along] = first
            box = [*shape]
            box[along] = size
            found.append(Holding(name, "float32", shape, tuple(offset), tuple(box)))
    return Holdings(tuple(found))


def boxes(holdings: Holdings, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a rank's boxes of these parameters, in memory of the rank."""
    return {
        each.name: np.ascontiguousarray(
            whole[each.name][
                tuple(
                    slice(first, first + size)
                    for first, size in zip(each.offset, each.shape, strict=True)
                )
            ]
        ).copy()
        for each in holdings.parameters
    }


def staged(receiver: WeightReceiver) -> dict[str, np.ndarray]:
    """Returns the arena's boxes; as bits where numpy lacks the type: floats of 8 bits, bfloat16."""
    memory = np.frombuffer(receiver.memory, np.uint8)
    return {
        name: memory[place.offset : place.offset + place.nbytes]
        .view(_VIEWS[ITEM_BYTES[place.holding.dtype]])
        .reshape(place.holding.shape)
        .copy()
        for name, place in receiver.arena.places.items()
    }


@dataclass
class Instance:
    """An inference instance that serves what its ranks copied at their commit."""

    ranks: list[WeightReceiver]
    name: str = "i0"
    serves: list[dict[str, np.ndarray]] = field(default_factory=list)
    commits: int = 0
    fails: bool = False
    waves: list[tuple[bool, bool]] = field(default_factory=list)
    """The commits' flags: whether it was the first wave, and the last."""

    async def commit(self, update: Staged) -> float | None:
        """Commits; the leader calls it."""
        pinned = [rank.pin(update.update_id) for rank in self.ranks[1:]]
        if self.fails:
            raise RuntimeError("out of paper")
        self.waves.append((update.first, update.last))
        before = self.serves or [{} for _ in self.ranks]
        self.serves = [
            {**serves, **staged(rank)} for serves, rank in zip(before, self.ranks, strict=True)
        ]
        for rank, of_rank in zip(self.ranks[1:], pinned, strict=True):
            rank.applied(of_rank)
        self.commits += 1
        return 0.25


@dataclass
class Job:
    coordinator: WeightCoordinator
    address: str
    senders: list[WeightSender]
    instances: list[Instance]
    engines: list[Engine]

    def links(self, name: str) -> Links:
        """Returns the links of the member with this name: "coordinator", "t1", "i0/1"."""
        if name == "coordinator":
            return self.coordinator._links
        if name.startswith("t"):
            return self.senders[int(name[1:])]._links
        instance, rank = name[1:].split("/")
        return self.instances[int(instance)].ranks[int(rank)]._links

    async def settled(self) -> None:
        """Waits until no leader is in doubt or applies an update. Other ranks keep what they have
        staged until the next update, as their leader may still make them apply it."""
        leaders = [instance.ranks[0] for instance in self.instances]
        await eventually(lambda: all(leader.idle for leader in leaders))


def served_by(instance: Instance) -> int:
    """Returns the version that all ranks of an instance serve, byte for byte; fails if there is
    none."""
    versions = {rank.version for rank in instance.ranks}
    assert len(versions) == 1, versions
    (version,) = versions
    for rank, serves in zip(instance.ranks, instance.serves, strict=True):
        wanted = boxes(rank.holdings, weights(version))
        assert serves.keys() == wanted.keys()
        for name, box in wanted.items():
            np.testing.assert_array_equal(serves[name], box)
    return version


@contextlib.asynccontextmanager
async def job(
    fabric: str,
    *,
    train: Sequence[Holdings],
    infer: Sequence[Sequence[Holdings]],
    settings: UpdateSettings | None = None,
    control_path: ControlPath | None = None,
    registrar: Registrar | None = None,
    by_message: Sequence[bool] = (),
    arena_bytes: int | None = None,
) -> AsyncIterator[Job]:
    """A job whose members are connected. `infer` has the holdings of each instance's ranks, and
    `by_message` whether its leader commits on the coordinator's message (all do by default)."""
    async with contextlib.AsyncExitStack() as stack:
        engines: list[Engine] = []

        async def engine(name: str) -> Engine:
            made = await stack.enter_async_context(
                Engine(cluster_key=KEY, fabrics=[fabric], name=name)
            )
            engines.append(made)
            return made

        lead = await engine("coordinator")
        coordinator = await stack.enter_async_context(
            WeightCoordinator(
                lead,
                trainers=len(train),
                settings=settings,
                control_path=control_path,
                registrar=registrar,
            )
        )
        instances = []
        for number, ranks in enumerate(infer):
            instance = Instance([], f"i{number}")
            told = not by_message or by_message[number]
            for rank, holdings in enumerate(ranks):
                receiver = await stack.enter_async_context(
                    WeightReceiver(
                        await engine(f"i{number}/{rank}"),
                        holdings,
                        instance_id=f"i{number}",
                        rank=rank,
                        ranks=len(ranks),
                        commit=instance.commit if rank == 0 and told else None,
                        arena_bytes=arena_bytes,
                    )
                )
                instance.ranks.append(receiver)
                await receiver.join(lead.address)
            instances.append(instance)
        senders = []
        for rank, holdings in enumerate(train):
            sender = await stack.enter_async_context(
                WeightSender(await engine(f"t{rank}"), holdings, rank)
            )
            await sender.join(lead.address)
            senders.append(sender)
        await coordinator.joined(len(infer), 30)
        yield Job(coordinator, lead.address, senders, instances, engines)
