"""Ways to break the code of weight updates on purpose: each must be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvxfer.weights.transfer import doubt, receiver, staged
from kvxfer.weights.transfer.messages import Vote
from kvxfer.weights.transfer.round import Round

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
    def broken(self: receiver.WeightReceiver, staged: staged.Staged, error: Any) -> None:
        self.applied(staged)

    receiver.WeightReceiver.broken = broken  # type: ignore[method-assign]


DEFECTS: Final[dict[str, tuple[Callable[[], None], Fault]]] = {
    "the first vote decides": (
        _first_vote_decides,
        Fault("single-0", "send", "Vote", "kill"),
    ),
    "a leader in doubt does not ask": (
        _leaders_in_doubt_do_not_ask,
        Fault("trainer-0", "send", "Commit", "kill", True, nth=2),
    ),
    "an instance that failed serves on": (
        _failures_are_not_told,
        Fault("pair-1", "apply", "half", "kill", True),
    ),
}
"""By name: what breaks the code, and a fault that shows it."""
