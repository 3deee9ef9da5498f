"""Ways to break the code of weight updates on purpose: each must be found."""

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


def _first_vote_decides() -> None:
    every = Round.all

    async def one(self: Any, kind: Any, members: Any, seconds: float, what: str) -> Any:
        return await every(self, kind, members[:1] if kind is Vote else members, seconds, what)

    setattr(Round, "all", one)  # noqa: B010


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
    "the first vote decides": (
        _first_vote_decides,
        "atomic",
        Fault("single-0", "send", "Vote", "kill"),
    ),
    "a leader in doubt does not ask": (
        _leaders_in_doubt_do_not_ask,
        "atomic",
        Fault("trainer-0", "send", "Commit", "kill", True, nth=2),
    ),
    "an instance that failed serves on": (
        _failures_are_not_told,
        "atomic",
        Fault("pair-1", "apply", "half", "kill", True),
    ),
    "an instance that has some waves serves on": (
        _some_waves_are_served,
        "wave",
        Fault("trainer-0", "send", "Commit", "kill", True, nth=2),
    ),
}
"""By name: a function that breaks the code, the mode, and a fault that shows the defect."""
