"""The autoscaler's last decisions in this replica, and when it last wanted a change."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvxfer.overview import ScalingStep, ScalingSummary
from kvxfer.scaling import RoleDecision, ScalePlan

_KEPT: Final = 20


class ScalingHistory:
    """The rounds of one autoscaler, in one event loop."""

    def __init__(self) -> None:
        self._latest: ScalePlan | None = None
        self._changes: deque[tuple[float, RoleDecision]] = deque(maxlen=_KEPT)

    def note(self, plan: ScalePlan) -> None:
        """Notes a round that went well."""
        self._latest = plan
        for decision in (plan.prefill, plan.decode):
            if decision.direction != "hold":
                self._note(plan.at, decision)

    def _note(self, at: float, decision: RoleDecision) -> None:
        """Notes a change. A repeated one, as in a dry run, replaces the earlier one."""
        last = next((held for held in self._changes if held[1].role is decision.role), None)
        if last is not None and last[1] == decision:
            self._changes.remove(last)
        self._changes.appendleft((at, decision))

    def summary(self, now: float) -> ScalingSummary | None:
        """Returns the history at `now`, in seconds since the Unix epoch; None before the first
        round."""
        plan = self._latest
        if plan is None:
            return None
        return ScalingSummary(
            policy=plan.policy,
            backend=plan.backend,
            leads=plan.leads,
            now=tuple(_step(plan.at, each, now) for each in (plan.prefill, plan.decode)),
            changes=tuple(_step(at, each, now) for at, each in self._changes),
        )


def _step(at: float, decision: RoleDecision, now: float) -> ScalingStep:
    return ScalingStep(
        age_seconds=max(now - at, 0.0),
        role=decision.role,
        current=decision.current,
        wanted=decision.wanted,
        direction=decision.direction,
        because=decision.because,
    )
