"""Defects to plant in the code of weight updates. The rounds must find each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvxfer.weights.transfer import doubt, receiver
from kvxfer.weights.transfer.messages import Vote
from kvxfer.weights.transfer.round import Round
from kvxfer.weights.transfer.service import Service
from kvxfer.weights.transfer.settings import Mode
from kvxfer.weights.transfer.staged import Staged

from .catalogue import Fault


def _lost_votes_are_not_missed() -> None:
    every = Round.all

    async def of_living(self: Any, kind: Any, members: Any, seconds: float, what: str) -> Any:
        if kind is not Vote:
            return await every(self, kind, members, seconds, what)
        said, lost = self._said, self._lost
        while any((m.peer.id, Vote) not in said and m.peer.id not in lost for m in members):
            await self._changed.wait()
        self._error = None
        return [(m, said[m.peer.id, Vote]) for m in members if (m.peer.id, Vote) in said]

    setattr(Round, "all", of_living)  # noqa: B010


def _leaders_in_doubt_do_not_ask() -> None:
    async def resolve(*_: Any) -> doubt.End:
        return "aborted"

    setattr(receiver, "resolve", resolve)  # noqa: B010 (mypy: another signature)


def _failures_are_not_told() -> None:
    def broken(self: receiver.WeightReceiver, staged: Staged, error: Any) -> None:
        self.applied(staged)

    receiver.WeightReceiver.broken = broken  # type: ignore[method-assign]


def _some_waves_are_served() -> None:
    applied = Service.applied

    def serves_on(self: Service, staged: Staged, plan_id: str) -> None:
        applied(self, staged, plan_id)
        self.partial = None

    Service.applied = serves_on  # type: ignore[method-assign]


DEFECTS: Final[dict[str, tuple[Callable[[], None], Mode, Fault]]] = {
    "the vote of a lost rank is not missed": (
        _lost_votes_are_not_missed,
        "atomic",
        Fault("single-0", "send", "Vote", "kill"),
    ),
    "a leader in doubt does not ask": (
        _leaders_in_doubt_do_not_ask,
        "atomic",
        Fault("trainer-0", "send", "Commit", "kill", True, nth=2),
    ),
    "an instance that failed keeps serving": (
        _failures_are_not_told,
        "atomic",
        Fault("pair-1", "apply", "half", "kill", True),
    ),
    "an instance that has some waves keeps serving": (
        _some_waves_are_served,
        "wave",
        Fault("trainer-0", "send", "Commit", "kill", True, nth=2),
    ),
}
"""The defects by name: a function that breaks the code, the mode, and a fault that shows it."""
