"""The part of a plan that concerns one member. Each member computes it from the same holdings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from kvxfer.weights.holdings import Holding, Holdings, map_of
from kvxfer.weights.plan.schedule import Schedule, plan_weights
from kvxfer.weights.transfer.arena import Arena, arena_of
from kvxfer.weights.transfer.messages import Plan
from kvxfer.weights.transfer.runs import Stretch, stretches_of

Bursts = tuple[tuple[Stretch, ...], ...]
"""The stretches of each burst that has any."""


def waves_in(plan: Plan) -> Iterator[Plan]:
    """Yields the plan of each wave, with its parameters alone."""
    if not plan.waves:
        yield plan
        return
    tied = {name: whole for each in plan.train for name, whole in each.tied.items()}
    follow: dict[str, set[str]] = {}
    for each in plan.infer:
        for name, whole in each.tied.items():
            follow.setdefault(whole, set()).add(name)
    for wave in plan.waves:
        staged = set(wave)
        wanted = staged.union(*(follow.get(name, ()) for name in wave))
        sources = wanted | {tied[name] for name in wanted if name in tied}
        yield replace(
            plan,
            train=tuple(_only(each, sources, wanted) for each in plan.train),
            infer=tuple(_only(each, staged, wanted) for each in plan.infer),
            waves=(),
        )


def _only(holdings: Holdings, names: set[str], tied: set[str]) -> Holdings:
    return replace(
        holdings,
        parameters=tuple(each for each in holdings.parameters if each.name in names),
        tied={name: whole for name, whole in holdings.tied.items() if name in tied},
    )


def schedule_of(plan: Plan) -> Schedule:
    """Computes the schedule. Raises WeightsMismatch and InvalidArgument that name what is wrong."""
    return plan_weights(map_of(plan.train, plan.infer), plan.settings)


def sent_by(schedule: Schedule, plan: Plan, sender: int) -> dict[int, Bursts]:
    """Returns the bursts that a training rank writes, in order, by number of the receiver."""
    held = {each.name: each for each in plan.train[sender].parameters}
    arenas = {}
    found: dict[int, dict[int, list[Stretch]]] = defaultdict(lambda: defaultdict(list))
    for write in schedule.writes_of(sender):
        if write.receiver not in arenas:
            arenas[write.receiver] = arena_of(plan.infer[write.receiver])
        found[write.receiver][write.burst] += stretches_of(write, held, arenas[write.receiver])
    return {receiver: _bursts(bursts) for receiver, bursts in found.items()}


def sent_to(schedule: Schedule, plan: Plan, receiver: int) -> dict[int, tuple[Stretch, ...]]:
    """Returns the stretches that an inference rank gets, by number of the sender."""
    arena = arena_of(plan.infer[receiver])
    found: dict[int, list[Stretch]] = defaultdict(list)
    held: dict[int, dict[str, Holding]] = {}
    for write in schedule.writes_to(receiver):
        names = held.setdefault(
            write.sender, {each.name: each for each in plan.train[write.sender].parameters}
        )
        found[write.sender] += stretches_of(write, names, arena)
    return {sender: tuple(stretches) for sender, stretches in found.items()}


class Incoming(NamedTuple):
    """The part of a wave that goes to one inference rank."""

    arena: Arena
    expected: dict[int, tuple[Stretch, ...]]
    """The stretches of each training rank, by its number."""


def incoming(plan: Plan) -> list[Incoming]:
    """Returns what each wave has for the inference rank that the plan was sent to."""
    return [
        Incoming(arena_of(wave.infer[plan.number]), sent_to(schedule_of(wave), wave, plan.number))
        for wave in waves_in(plan)
    ]


def _bursts(bursts: dict[int, list[Stretch]]) -> Bursts:
    return tuple(tuple(bursts[number]) for number in sorted(bursts))
