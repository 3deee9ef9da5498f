"""The control loop: measure, decide, and, if this replica leads, have a backend apply it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import ControlPlaneUnavailable, KvxferError, NotLeader, ScalingFailed
from kvxfer.instances import Role
from kvxfer.scaling import ScalePlan
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.scaling.backend import ScalingBackend
from kvxfer.scheduler.scaling.decision import Decision, ScalingState, decide
from kvxfer.scheduler.scaling.leader import Leader, OnlyReplica
from kvxfer.scheduler.scaling.measurements import Measurements, measure
from kvxfer.scheduler.scaling.policy import ScalingPolicy

_log = logging.getLogger("kvxfer.scaling")

_ROUND_SECONDS: Final = 30.0
_RESIGN_SECONDS: Final = 5.0


class Autoscaler:
    """The control loop of a replica. All replicas decide; only the leader's decisions are applied.

    A replica that takes over therefore knows the load's history. Without a backend nothing is ever
    applied, and the plan is a dry run. One event loop.
    """

    def __init__(
        self,
        registry: Registry,
        policy: ScalingPolicy | None = None,
        *,
        policy_name: str = "default",
        backend: ScalingBackend | None = None,
        leader: Leader | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.policy = policy or ScalingPolicy()
        self.policy_name = policy_name
        self._registry = registry
        self._backend = backend
        self._leader = leader or OnlyReplica()
        self._clock = clock
        self._state = ScalingState()
        self._token: int | None = None

    async def run(
        self,
        on_round: Callable[[ScalePlan], None] = lambda _: None,
        on_failure: Callable[[KvxferError | TimeoutError], None] = lambda _: None,
    ) -> None:
        """Runs rounds without end, `interval` seconds apart. Reports a round that fails; the next
        one tries again, and until then the fleet stays as it is."""
        trouble: str | None = None
        while True:
            try:
                async with asyncio.timeout(_ROUND_SECONDS):
                    on_round(await self.round())
                trouble = None
            except (KvxferError, TimeoutError) as error:
                on_failure(error)
                what = str(error) or f"a round took longer than {_ROUND_SECONDS:g} s"
                if what != trouble:
                    _log.warning("the autoscaler: %s", what)
                trouble = what
            await asyncio.sleep(self.policy.interval)

    async def round(self) -> ScalePlan:
        """Makes one decision, and applies it if this replica leads.

        Raises ScalingFailed, NotLeader and ControlPlaneUnavailable.
        """
        await self._campaign()
        measurements = await self._measure()
        if self._registry.stale_seconds is not None:
            raise ControlPlaneUnavailable(
                "the registry is unavailable, and nothing is scaled by the fleet's last known state"
            )
        decision, after = decide(measurements, self.policy, self._state)
        plan = self._plan(measurements, decision)
        # A decision that then fails counts, too: its cooldown limits how often it is tried.
        self._state = after
        if self._backend is None or self._token is None:
            return plan
        await self._apply(self._backend, self._token, decision)
        return plan

    async def plan(self) -> ScalePlan:
        """Returns what a round would decide now; applies and remembers nothing."""
        measurements = await self._measure()
        decision, _ = decide(measurements, self.policy, self._state)
        return self._plan(measurements, decision)

    async def close(self) -> None:
        """Resigns, and closes leader and backend."""
        try:
            async with asyncio.timeout(_RESIGN_SECONDS):
                await self._leader.resign()
        except (KvxferError, TimeoutError) as error:
            _log.warning("the autoscaler's leadership ends only with its term: %s", error)
        await self._leader.close()
        if self._backend is not None:
            await self._backend.close()

    async def _apply(self, backend: ScalingBackend, token: int, decision: Decision) -> None:
        """Applies the decision to both roles, then raises the first failure."""
        fence = partial(self._leader.confirm, token)
        failure: ScalingFailed | None = None
        for role in (decision.prefill, decision.decode):
            if role.direction == "hold":
                continue
            try:
                await backend.scale(role.role, role.wanted, fence)
            except NotLeader:
                self._token = None
                raise
            except ScalingFailed as error:
                failure = failure or error
                continue
            _log.info(
                "%s workers: %d to %d; %s", role.role, role.current, role.wanted, role.because
            )
        if failure is not None:
            raise failure

    async def _campaign(self) -> None:
        token = None
        try:
            token = await self._leader.campaign()
        finally:
            self._token = token

    async def _measure(self) -> Measurements:
        requested: dict[Role, int] = {}
        if self._backend is not None:
            for role in (Role.PREFILL, Role.DECODE):
                requested[role] = await self._backend.requested(role)
        return measure(
            await self._registry.instances(),
            at=self._clock.monotonic(),
            model=self.policy.model,
            requested=requested,
        )

    def _plan(self, measurements: Measurements, decision: Decision) -> ScalePlan:
        since = self._state.prefill.since
        return ScalePlan(
            at=self._clock.unix(),
            policy=self.policy_name,
            model=self.policy.model,
            backend="none" if self._backend is None else self._backend.name,
            leads=self._token is not None,
            observed_seconds=0.0 if since is None else measurements.at - since,
            prefill=decision.prefill,
            decode=decision.decode,
        )
