"""The promises that must hold at every moment, whatever faults the ranks of a group have."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from kvxfer.moe.view_messages import Refusal, View

from .network import Process
from .world import Violation, World


class Oracle:
    """A judge that hears of each adopted view, and of each step that begins and completes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.views: dict[int, View] = {}
        self._decided_at: dict[int, float] = {}
        self._takes_part: dict[int, dict[int, Process]] = {}
        """The processes that entered each view from the previous view, by the view's number."""
        self._completed: dict[tuple[Process, int], View] = {}
        self._refused: set[tuple[int, int]] = set()
        """The ranks, and the steps that they could not begin."""
        self._began: dict[int, list[tuple[float, Process]]] = collections.defaultdict(list)
        """The begins of steps, by the number of the view in which they were begun."""
        self.steps: dict[Process, int] = collections.defaultdict(int)
        """The number of steps that each rank has combined."""

    def adopts_first(self, rank: Process) -> None:
        view = rank.machine.view
        assert view is not None
        self.views[view.number] = view
        self._decided_at[view.number] = self._world.clock.now
        self._takes_part[view.number] = {}

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)

    def adopts(self, rank: Process, view: View) -> None:
        known = self.views.get(view.number)
        self._require(
            known in (None, view),
            f"{rank.name} adopts view {view}; for others it is {known}",
        )
        self._require(rank.rank in view.members, f"{rank.name} adopts {view} without being in it")
        if known is None:
            self._decide(rank, view)
        if rank.rank in view.newcomers:
            self._require(rank.newcomer, f"{rank.name} is a newcomer twice, in {view}")
            return
        expected = self._takes_part[view.number].get(rank.rank)
        self._require(
            expected is rank,
            f"{rank.name} adopts {view}, for which {expected and expected.name} was asked",
        )

    def _decide(self, decider: Process, view: View) -> None:
        self._world.count("views")
        if view.newcomers:
            self._world.count("newcomers admitted", len(view.newcomers))
        self.views[view.number] = view
        self._decided_at[view.number] = self._world.clock.now
        processes = {
            rank: decider.connections[rank].other(decider) if rank != decider.rank else decider
            for rank in view.members
        }
        for newcomer in view.newcomers:
            self._require_met(processes[newcomer], processes.values())
        self._takes_part[view.number] = {
            rank: process for rank, process in processes.items() if rank not in view.newcomers
        }
        for (process, step), in_view in self._completed.items():
            self._require_one_view(process, step, in_view, view)
        self._require_known_losses(view)

    def _require_met(self, newcomer: Process, members: Iterable[Process]) -> None:
        for member in members:
            met = self._world.network.between(newcomer, member)
            self._require(
                bool(met) or member is newcomer,
                f"{newcomer.name} is admitted without a connection to {member.name}",
            )

    def _require_known_losses(self, view: View) -> None:
        """Requires that no faultless rank is lost if more than half of a view stay without a
        fault."""
        before = set(self.views[view.previous].members)
        unbroken = before - self._world.touched
        stay = unbroken & set(view.members)
        gone = unbroken - stay if 2 * len(stay) > len(before) else set()
        self._require(not gone, f"{sorted(gone)} had no fault, but are not in {view}")

    def _require_one_view(self, process: Process, step: int, in_view: View, view: View) -> None:
        """Requires that a process in a view has not completed that view's steps in an earlier
        view."""
        current = process.machine.view
        self._require(
            self._takes_part[view.number].get(process.rank) is not process
            or step < view.first_step
            or self._round(in_view) >= self._round(view)
            or current is None
            or (not self._follows(current, view) and not self._follows(view, current)),
            f"{process.name} completed the dispatch of step {step} in view {in_view.number}; the "
            f"others run it in {view}",
        )

    def _follows(self, view: View, before: View) -> bool:
        while self._round(view) > self._round(before):
            view = self.views[view.previous]
        return view == before

    def _round(self, view: View) -> int:
        return view.number // self._world.size

    # --- steps that no rank runs

    def refuses(self, rank: Process, step: int) -> None:
        self._refused.add((rank.rank, step))
        self._world.count("steps refused")

    def refused(self, rank: Process, step: int) -> None:
        self._require(
            step in rank.left_out, f"{rank.name} refused step {step}, which the others run"
        )

    def leaves_out(self, rank: Process, refusal: Refusal, view: View) -> None:
        self._require(
            (refusal.rank, refusal.step) in self._refused,
            f"{rank.name} leaves out step {refusal.step}, which rank {refusal.rank} can begin",
        )
        self._require(
            (rank, refusal.step) not in self._completed,
            f"{rank.name} completed the dispatch of step {refusal.step}, which {view} leaves out",
        )
        self._world.count("steps left out")

    def _require_run(self, rank: Process, step: int, view: View) -> None:
        """Requires that neither this view nor one before it leaves the step out."""
        while True:
            self._require(
                all(refusal.step != step for refusal in view.refused),
                f"{rank.name} completes the dispatch of step {step}, which {view} leaves out",
            )
            if view.number == view.previous:
                return
            view = self.views[view.previous]

    # --- steps

    def begins(self, rank: Process, step: int, view: View) -> None:
        self._began[view.number].append((self._world.clock.now, rank))
        if rank.rank in view.newcomers and not self.steps[rank]:
            self._require(
                step >= view.first_step,
                f"{rank.name} begins with step {step} in {view}",
            )

    def completes(self, rank: Process, step: int, view: View, missing: set[int]) -> None:
        """Checks a completed dispatch."""
        self._completed[rank, step] = view
        self._require_run(rank, step, view)
        for other in self.views.values():
            self._require_one_view(rank, step, view, other)
        lost = {each for each in missing if rank.exchange.is_lost(each, step)}
        self._require(
            missing == lost,
            f"{rank.name} completes step {step} without {sorted(missing - lost)}, not lost",
        )
        if missing:
            self._world.count("dispatches with missing ranks")

    def combines(
        self,
        rank: Process,
        step: int,
        view: View,
        whole: dict[int, frozenset[int]],
        missing: set[int],
        lost: set[int],
    ) -> None:
        self._require(
            missing <= lost,
            f"{rank.name} combines step {step} without {sorted(missing - lost)}, not lost",
        )
        for source, of in whole.items():
            self._require(
                rank.rank in of,
                f"{rank.name} combines in step {step} what rank {source} answered to {sorted(of)}",
            )
        self.steps[rank] += 1
        self._world.count("steps")
        if missing:
            self._world.count("combines with missing ranks")

    # --- the end

    def require_one_group(self) -> None:
        """Requires that ranks continue in only one of two successors of a view."""
        after: dict[int, list[View]] = collections.defaultdict(list)
        for view in self.views.values():
            if view.number:
                after[view.previous].append(view)
        for siblings in after.values():
            for at, one in enumerate(siblings):
                for other in siblings[at + 1 :]:
                    self._require_not_both(one, other, after)

    def _require_not_both(self, one: View, other: View, after: dict[int, list[View]]) -> None:
        since = max(self._decided_at[one.number], self._decided_at[other.number])
        first, second = (self._lived_in(view, since, after) for view in (one, other))
        self._require(
            not first or not second or first[1] < second[0] or second[1] < first[0],
            f"the group continues twice: in {one} and in {other}",
        )

    def _lived_in(
        self, view: View, since: float, after: dict[int, list[View]]
    ) -> tuple[float, float] | None:
        """Returns the first and the last time at which steps began in the view or its successors.
        Counts only ranks that began more steps than can be under way at once."""
        begun: dict[Process, list[float]] = collections.defaultdict(list)
        pending = [view]
        while pending:
            each = pending.pop()
            pending += after.get(each.number, [])
            for at, rank in self._began[each.number]:
                if at > since:
                    begun[rank].append(at)
        times = [at for each in begun.values() if len(each) > 3 for at in each]
        return (min(times), max(times)) if times else None

    def require_survivors(self) -> None:
        """Requires that the ranks without a fault are in one view, if they are more than half."""
        world = self._world
        core = [rank for rank in world.first if rank.rank not in world.touched]
        if 2 * len(core) <= world.size or len(core) < world.min_ranks:
            return
        views = {rank.machine.view for rank in core if rank.machine.ended is None}
        ended = [rank.name for rank in core if rank.machine.ended is not None]
        self._require(not ended, f"{ended} had no fault and are among the majority, but ended")
        self._require(len(views) == 1, f"ranks without a fault are in views {views}")
        world.count("most survived")
