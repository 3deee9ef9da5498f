"""A model of the native exchange: the data that a rank has sent and received in its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvxfer.moe.view_messages import View

_NONE: Final = (-1, frozenset[int]())
_NOTHING: Final = ("", -1)


class Exchange:
    """The exchange of one rank. Data of another rank is complete or absent, and names its view.
    `write` carries data to a rank; `complete` is called when the awaited data is complete."""

    def __init__(
        self,
        rank: int,
        write: Callable[[int, tuple[Any, ...]], None],
        complete: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._carry, self._complete = write, complete
        self.next_step = 0
        self.down: set[int] = set()
        self._waits_for = _NOTHING
        self._views: dict[int, View] = {}  # the view in which each step was dispatched
        self._gone: dict[int, set[int]] = {}  # the members that left after each step
        self._sources: dict[int, frozenset[int]] = {}
        self._dispatches: dict[tuple[int, int], int] = {}
        self._answers: dict[tuple[int, int], tuple[int, frozenset[int]]] = {}

    def lands(self, rank: int, data: tuple[Any, ...]) -> None:
        kind, step, *rest = data
        if kind == "dispatch":
            self._dispatches[rank, step] = rest[0]
            complete = self._waits_for == (kind, step) and self.dispatched(step)
        else:
            self._answers[rank, step] = (rest[0], rest[1])
            complete = self._waits_for == (kind, step) and self.combined(step)
        if complete:
            self._complete()

    def waits_for(self, kind: str, step: int) -> None:
        """Sets the data that wakes up the rank once it is complete."""
        self._waits_for = (kind, step)

    def lost(self, rank: int) -> None:
        self.down.add(rank)

    def set_up(self, rank: int) -> None:
        """Takes note of a connection to a new process of a rank. Drops the old process's data."""
        self.down.discard(rank)
        for landed in (self._dispatches, self._answers):
            for key in [key for key in landed if key[0] == rank]:
                del landed[key]

    def set_view(self, view: View, *, newcomer: bool) -> None:
        if newcomer:
            self.next_step = view.first_step
        for step, before in self._views.items():
            if step >= view.first_step:
                self._post(step, view)
            else:
                gone = set(before.members) - set(view.members)
                self._gone.setdefault(step, set()).update(gone)

    def leave_out(self, step: int) -> None:
        """Drops a step that no rank runs."""
        self._views.pop(step, None)
        self._gone.pop(step, None)
        if self._waits_for == ("dispatch", step):
            self._waits_for = _NOTHING

    # --- a step

    def skip(self) -> None:
        self.next_step += 1

    def dispatch(self, view: View) -> int:
        step = self.next_step
        self.next_step += 1
        self._post(step, view)
        return step

    def _post(self, step: int, view: View) -> None:
        self._views[step] = view
        for rank in self._others(step):
            self._write(rank, ("dispatch", step, view.number))

    def view(self, step: int) -> View:
        return self._views[step]

    def dispatched(self, step: int) -> bool:
        """Returns whether each other rank of the step's view has dispatched it, or is lost."""
        view, own = self._views[step], self._rank
        for rank in view.members:
            here = rank == own or self._dispatches.get((rank, step)) == view.number
            if not here and not self._is_lost(rank, step):
                return False
        return True

    def receive(self, step: int) -> set[int]:
        """Receives the dispatches of a step. Returns the ranks that are missing."""
        number = self._views[step].number
        others = set(self._others(step))
        sources = {rank for rank in others if self._dispatches.get((rank, step)) == number}
        self._sources[step] = frozenset(sources)
        return others - sources

    def answer(self, step: int) -> None:
        number, sources = self._views[step].number, self._sources[step]
        for rank in sources:
            self._write(rank, ("combine", step, number, sources))

    def combined(self, step: int) -> bool:
        """Returns whether each other rank of the step's view has answered, or is lost."""
        view, own = self._views[step], self._rank
        for rank in view.members:
            here = rank == own or self._answers.get((rank, step), _NONE)[0] == view.number
            if not here and not self._is_lost(rank, step):
                return False
        return True

    def combine(self, step: int) -> tuple[dict[int, frozenset[int]], set[int]]:
        """Ends a step. Returns the sources of each rank that has answered, and the ranks that have
        not answered."""
        number = self._views[step].number
        others = self._others(step)
        whole = {
            rank: self._answers[rank, step][1]
            for rank in others
            if self._answers.get((rank, step), _NONE)[0] == number
        }
        missing = set(others) - whole.keys()
        del self._views[step], self._sources[step]
        self._gone.pop(step, None)
        for landed in (self._dispatches, self._answers):
            for rank in others:
                landed.pop((rank, step), None)  # type: ignore[attr-defined]
        return whole, missing

    def is_lost(self, rank: int, step: int) -> bool:
        return self._is_lost(rank, step)

    def _is_lost(self, rank: int, step: int) -> bool:
        return rank in self.down or rank in self._gone.get(step, ())

    def _others(self, step: int) -> list[int]:
        return [rank for rank in self._views[step].members if rank != self._rank]

    def _write(self, rank: int, data: tuple[Any, ...]) -> None:
        if rank not in self.down:
            self._carry(rank, data)
