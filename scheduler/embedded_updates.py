"""The weight updates of the registry inside one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvxfer.clock import Clock
from kvxfer.instances import Instance
from kvxfer.scheduler import refusals
from kvxfer.scheduler.weight_updates import (
    UpdateLedger,
    UpdateStep,
    announced,
    decided,
    lapsed,
    reported,
)
from kvxfer.weight_updates import (
    AnnounceUpdate,
    Decision,
    ReportUpdate,
    UpdateState,
    WeightUpdate,
)


class EmbeddedUpdates:
    """The updates of a registry, in one event loop. Every step begins with `end_lapsed`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ledger = UpdateLedger()
        # The ends of the leases of the updates under way, at most one per model.
        self._deadlines: dict[str, float] = {}
        self.ended: Counter[UpdateState] = Counter()

    def get(self, update_id: str) -> WeightUpdate:
        """Raises UnknownWeightUpdate."""
        update = self._ledger.get(update_id)
        if update is None:
            raise refusals.unknown_update(update_id)
        return update

    def all(self, model: str | None) -> tuple[WeightUpdate, ...]:
        return self._ledger.all(model)

    def announce(
        self, request: AnnounceUpdate, instances: Sequence[Instance], seconds: float
    ) -> UpdateStep:
        now = self._clock.unix()
        step = announced(request, instances, self._ledger, now=now, seconds=seconds)
        return step if step.before is not None else self._take(step)

    def report(self, update_id: str, report: ReportUpdate) -> UpdateStep:
        before = self.get(update_id)
        return self._take(UpdateStep(before, reported(before, report, now=self._clock.unix())))

    def decide(self, update_id: str, decision: Decision) -> UpdateStep:
        before = self.get(update_id)
        after = decided(before, decision, now=self._clock.unix())
        step = UpdateStep(before, after)
        # A decision that was made before renews no lease.
        return step if after is before else self._take(step)

    def end_lapsed(self, now: float) -> None:
        for update_id, deadline in list(self._deadlines.items()):
            if deadline <= now:
                before = self.get(update_id)
                self._take(UpdateStep(before, lapsed(before, at=self._clock.unix())))

    def extend(self, seconds: float) -> None:
        """Extends all leases by a time in which no coordinator could report."""
        for update_id in self._deadlines:
            self._deadlines[update_id] += seconds

    def _take(self, step: UpdateStep) -> UpdateStep:
        after = step.after
        self._ledger.put(after)
        if after.under_way:
            self._deadlines[after.update_id] = self._clock.monotonic() + after.lease_seconds
        elif self._deadlines.pop(after.update_id, None) is not None:
            self.ended[after.state] += 1
            self._ledger.trim()
        return step
