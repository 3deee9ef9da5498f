"""What one member does of a plan. Every member makes the plan by itself, of the same holdings."""

from __future__ import annotations

from collections import defaultdict

from kvxfer.weights.holdings import Holding, map_of
from kvxfer.weights.plan.schedule import Schedule, plan_weights
from kvxfer.weights.transfer.arena import arena_of
from kvxfer.weights.transfer.messages import Plan
from kvxfer.weights.transfer.runs import Stretch, stretches_of

Waves = tuple[tuple[Stretch, ...], ...]
"""The stretches of each wave that has any."""


def schedule_of(plan: Plan) -> Schedule:
    """Raises WeightsMismatch and InvalidArgument that name what does not fit."""
    return plan_weights(map_of(plan.train, plan.infer), plan.settings)


def sent_by(schedule: Schedule, plan: Plan, sender: int) -> dict[int, Waves]:
    """By number of the receiver: what a training rank writes, in the order in which it does."""
    held = {each.name: each for each in plan.train[sender].parameters}
    arenas = {}
    found: dict[int, dict[int, list[Stretch]]] = defaultdict(lambda: defaultdict(list))
    for write in schedule.writes_of(sender):
        if write.receiver not in arenas:
            arenas[write.receiver] = arena_of(plan.infer[write.receiver])
        found[write.receiver][write.wave] += stretches_of(write, held, arenas[write.receiver])
    return {receiver: _waves(waves) for receiver, waves in found.items()}


def sent_to(schedule: Schedule, plan: Plan, receiver: int) -> dict[int, tuple[Stretch, ...]]:
    """By number of the sender: what it writes to an inference rank."""
    arena = arena_of(plan.infer[receiver])
    found: dict[int, list[Stretch]] = defaultdict(list)
    held: dict[int, dict[str, Holding]] = {}
    for write in schedule.writes_to(receiver):
        names = held.setdefault(
            write.sender, {each.name: each for each in plan.train[write.sender].parameters}
        )
        found[write.sender] += stretches_of(write, names, arena)
    return {sender: tuple(stretches) for sender, stretches in found.items()}


def _waves(waves: dict[int, list[Stretch]]) -> Waves:
    return tuple(tuple(waves[number]) for number in sorted(waves))
