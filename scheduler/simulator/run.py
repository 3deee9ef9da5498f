"""A simulation from its settings to its results."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvxfer.instances import Role
from kvxfer.scheduler.scaling.autoscaler import Autoscaler
from kvxfer.scheduler.scaling.backend import ScalingBackend
from kvxfer.scheduler.scaling.policy import ScalingPolicy
from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.simulator.between import Between, changes, match
from kvxfer.scheduler.simulator.fleet import SimulatedFleet
from kvxfer.scheduler.simulator.members import FleetSettings, immediately
from kvxfer.scheduler.simulator.policies import Policy
from kvxfer.scheduler.simulator.tally import Action, Results, Window, summarise
from kvxfer.scheduler.simulator.workers import Request, Worker
from kvxfer.scheduler.simulator.workload import Arrivals, Workload

_WINDOWS: Final = 96
_WINDOW_SECONDS: Final = 2.0
_FEWEST, _MOST = 24, 288
# The most seconds that requests under way at the end may take to finish.
_LAST_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The settings of a simulation, except the policy."""

    workload: Workload
    model: WorkerModel
    detail: int = 600_000
    """The most requests to simulate one by one; if there are more, only windows are simulated."""
    heartbeat_seconds: float = 2.0
    ttft_target: float = 1.0
    itl_target: float = 0.05
    rack_size: int | None = None
    gpus: float = 1.0
    """GPUs per instance."""
    cost_per_hour: float = 0.0
    """The cost of a GPU per hour."""
    seed: int = 0

    @property
    def sampled(self) -> bool:
        return self.workload.expected(0.0, self.workload.seconds) > self.detail

    def windows(self) -> list[Window]:
        """Returns windows over all of the time, or one short window at random in each equal part of
        it."""
        seconds = self.workload.seconds
        requests = self.workload.expected(0.0, seconds)
        if not self.sampled:
            edges = np.linspace(0.0, seconds, _WINDOWS + 1)
            return [self._window(b, e, b, e) for b, e in itertools.pairwise(edges.tolist())]
        rate = requests / seconds
        width = min(max(_WINDOW_SECONDS, self.detail / rate / _MOST), seconds)
        count = max(int(self.detail / (rate * width)), _FEWEST)
        count = max(min(count, int(seconds / width)), 1)
        draw = np.random.default_rng([self.seed, 3])
        windows = []
        for begins, ends in itertools.pairwise(np.linspace(0.0, seconds, count + 1).tolist()):
            start = begins + draw.random() * max(ends - begins - width, 0.0)
            windows.append(self._window(begins, ends, start, start + width))
        return windows

    def _window(self, begins: float, ends: float, start: float, end: float) -> Window:
        return Window(begins, ends, start, end, self.workload.expected(begins, ends))

    def fleet(self, policy: Policy) -> SimulatedFleet:
        return SimulatedFleet(
            FleetSettings(
                model=self.model,
                scorer=policy.scorer,
                heartbeat_seconds=self.heartbeat_seconds,
                ttft_target=self.ttft_target,
                itl_target=self.itl_target,
                rack_size=self.rack_size,
                tokens_per_hash=self.workload.tokens_per_hash,
                metered=policy.scaling is not None and not self.sampled,
                seed=self.seed,
            )
        )


def simulate(
    simulation: Simulation, policy: Policy, on_window: Callable[[], None] = lambda: None
) -> Results:
    """Runs all of the workload under one policy; every policy gets the same requests."""
    run = _run_sampled if simulation.sampled else _run_whole
    return run(simulation, policy, on_window)


def _run_whole(simulation: Simulation, policy: Policy, on_window: Callable[[], None]) -> Results:
    fleet = simulation.fleet(policy)
    for role, count in ((Role.PREFILL, policy.prefill), (Role.DECODE, policy.decode)):
        for _ in range(count):
            fleet.add(role)
    actions: list[Action] = []
    if policy.scaling is not None:
        _autoscale(fleet, policy.scaling, actions)
    windows = simulation.windows()
    for number, window in enumerate(windows):
        fleet.open_window(window)
        pieces = simulation.workload.between(window.start, window.end)
        fleet.serve(_requests(pieces, number, 0.0), window.end)
        window.expected = window.arrived
        on_window()
    hours = [fleet.worker_seconds(role) / 3600 for role in (Role.PREFILL, Role.DECODE)]
    fleet.close_window()
    fleet.finish(at_most=_LAST_SECONDS)
    return _results(simulation, policy, windows, hours, actions)


def _run_sampled(simulation: Simulation, policy: Policy, on_window: Callable[[], None]) -> Results:
    fleet = simulation.fleet(policy)
    workload = simulation.workload
    between = Between(
        simulation.model,
        policy,
        workload.load,
        first_token_seconds=fleet.settings.first_token_seconds,
    )
    draw = np.random.default_rng([simulation.seed, 4])
    windows = simulation.windows()
    for number, window in enumerate(windows):
        between.advance(window.start)
        around = next(workload.between(window.start, window.ends), None)
        if around is not None:
            match(fleet, between.state, around, draw)
        fleet.open_window(window)
        begun = fleet.now
        pieces = workload.between(window.start, window.end)
        fleet.serve(
            _requests(pieces, number, begun - window.start), begun + window.end - window.start
        )
        fleet.close_window()
        between.resume(fleet, window)
        on_window()
    between.advance(workload.seconds)
    hours = [seconds / 3600 for seconds in between.worker_seconds]
    return _results(simulation, policy, windows, hours, between.actions)


def _requests(pieces: Iterator[Arrivals], window: int, later: float) -> Iterator[Request]:
    for piece in pieces:
        hashes = piece.hashes or itertools.repeat(())
        columns = (piece.at + later).tolist(), piece.prompt.tolist(), piece.output.tolist()
        for at, prompt, output, named in zip(*columns, hashes, strict=False):
            yield Request(at, prompt, output, window, hashes=named)


def _results(
    simulation: Simulation,
    policy: Policy,
    windows: list[Window],
    hours: list[float],
    actions: list[Action],
) -> Results:
    return summarise(
        windows,
        policy=policy.name,
        model=simulation.model,
        sampled=simulation.sampled,
        prefill_hours=hours[0],
        decode_hours=hours[1],
        gpus=simulation.gpus,
        cost_per_hour=simulation.cost_per_hour,
        actions=actions,
    )


# --- the autoscaler of a whole run --------------------------------------------------------------


class _Backend(ScalingBackend):
    """The workers of a simulated fleet, which take their time to start."""

    name = "simulated"

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet

    async def requested(self, role: Role) -> int:
        return self._fleet.count(role)

    async def scale(self, role: Role, count: int, fence: Callable[[], Awaitable[None]]) -> None:
        await fence()
        more = count - self._fleet.count(role)
        for _ in range(more):
            worker: Worker = self._fleet.add(role, ready=False)
            self._fleet.after(self._fleet.model.start_seconds, self._fleet.make_ready, worker)
        if more < 0:
            self._fleet.take_away(role, -more)

    async def close(self) -> None:
        pass


def _autoscale(fleet: SimulatedFleet, scaling: ScalingPolicy, actions: list[Action]) -> None:
    """Runs a round of the real autoscaler every `interval`."""
    autoscaler = Autoscaler(fleet.registry, scaling, backend=_Backend(fleet), clock=fleet)

    def round_(_: Any) -> None:
        actions.extend(changes(fleet.now, immediately(autoscaler.round())))
        fleet.after(scaling.interval, round_)

    fleet.after(scaling.interval, round_)
