"""Deliberate defects. The checks must find each within some hundreds of seeds; otherwise they prove
nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

from kvxfer.moe import membership
from kvxfer.moe.membership import Membership
from kvxfer.moe.view_effects import Effects, Send
from kvxfer.moe.view_messages import Excluded, View


@dataclass(frozen=True)
class Defects:
    """Defects of the simulated ranks, and `patches` of the real machine."""

    completes_blocked: bool = False
    deaf_in_combine: bool = False
    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = ()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self.patches:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield


NONE: Final = Defects()


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> Defects:
    return replace(NONE, patches=((owner, name, replacement),))


_received_flush = Membership._received_flush


def _keeps_its_view(self: Membership, rank: int, flush: Any) -> Effects:
    if flush.view == self._view.previous != self._view.number:
        return ()
    return _received_flush(self, rank, flush)


_adopt = Membership._adopt


def _leaves_newcomers_to_the_leader(self: Membership, view: View) -> Effects:
    return tuple(
        effect
        for effect in _adopt(self, view)
        if not (isinstance(effect, Send) and effect.rank in view.newcomers)
    )


_answered = Membership.answered


def _hears_no_exclusion(self: Membership, rank: int, ask: Any, answer: Any) -> Effects:
    return _answered(self, rank, ask, None if isinstance(answer, Excluded) else answer)


def _last_step(self: Membership, told: Any) -> int:
    return max([self._step, *(flush.next_step for flush in told)])


def _counts_rounds(self: Membership) -> int:
    return (self._round(self._view.number) + 1) * self.ranks


def _hears_any(self: Membership, survivors: set[int], told: Any) -> bool:
    return bool(told.keys() == survivors - {self.rank})


def _asks_none(self: Membership, survivors: set[int], told: Any) -> set[int]:
    return set()


def _majority_asks_none(self: Membership, survivors: set[int], told: Any) -> set[int]:
    if 2 * len(survivors) > len(self._view.members):
        return set()
    return set(range(self.ranks)) - survivors - self._ready


def _admits_unheard(self: Membership, survivors: set[int], told: Any) -> set[int]:
    return self._ready & self._announced.keys()


def _forgets_refusals(self: Membership, first_step: int, told: Any) -> tuple[Any, ...]:
    return ()


_left_out = Membership._left_out


def _forgets_earlier_refusals(self: Membership, first_step: int, told: Any) -> tuple[Any, ...]:
    earlier = {refusal.step for refusal in self._view.refused}
    return tuple(
        refusal for refusal in _left_out(self, first_step, told) if refusal.step not in earlier
    )


def _no_loser(rank: int, told: Any) -> None:
    return None


def _each_is_for_itself(rank: int, told: Any) -> int | None:
    for other, flush in sorted(told.items()):
        for named in flush.lost:
            if named == rank:
                return int(other)
            if named in told:
                return int(named)
    return None


DEFECTS: Final[dict[str, Defects]] = {
    "dispatches complete in a change": Defects(completes_blocked=True),
    "no answer in combine_recv": Defects(deaf_in_combine=True),
    "a decision is not passed on": _patch(Membership, "_received_flush", _keeps_its_view),
    "only the leader tells newcomers": _patch(
        Membership, "_adopt", _leaves_newcomers_to_the_leader
    ),
    "exclusion ignored": _patch(Membership, "answered", _hears_no_exclusion),
    "the last step is the first": _patch(Membership, "_first_step", _last_step),
    "numbers without the leader": _patch(Membership, "_next_number", _counts_rounds),
    "decision on different losses": _patch(Membership, "_all_say_the_same", _hears_any),
    "lost ranks not asked": _patch(Membership, "_doubtful", _asks_none),
    "a majority does not ask": _patch(Membership, "_doubtful", _majority_asks_none),
    "newcomers that not all have met": _patch(Membership, "_admissible", _admits_unheard),
    "refusals are not decided": _patch(Membership, "_left_out", _forgets_refusals),
    "later views forget refusals": _patch(Membership, "_left_out", _forgets_earlier_refusals),
    "accusations not judged": _patch(membership, "loser", _no_loser),
    "accusations believed": _patch(membership, "loser", _each_is_for_itself),
}
