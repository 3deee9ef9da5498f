"""The time between the windows of a simulation, on paper.

A large fleet has too many requests in a day to simulate one by one. So short windows, one drawn at
random from each part of the day, are simulated request by request; between them runs the fluid
model of `kvxfer scale replay`, which becomes exact as a fleet grows. The model begins with the
state of the workers at the end of a window, and the next window begins with the state of the model.
A queue that a burst leaves behind, and workers that have to start, are therefore carried over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from kvxfer.instances import Role
from kvxfer.scaling import ScalePlan
from kvxfer.scheduler.scaling.decision import Decision, ScalingState, decide
from kvxfer.scheduler.scaling.paper_fleet import PaperFleet, PaperState
from kvxfer.scheduler.scaling.policy import ScalingPolicy
from kvxfer.scheduler.scaling.trace import Load
from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.simulator.fleet import SimulatedFleet
from kvxfer.scheduler.simulator.policies import Policy
from kvxfer.scheduler.simulator.tally import Action, Window
from kvxfer.scheduler.simulator.workers import DecodeWorker, PrefillWorker, Request
from kvxfer.scheduler.simulator.workload import Arrivals

_STEP: Final = 1.0
# Seconds before the first window: long enough for batches to fill up.
_WARM_UP: Final = 600
# A queue that is worked off within this comes from the randomness of arrivals, which the windows
# have themselves.
_CHANCE_SECONDS: Final = 1.0


class Between:
    """The fleet between the windows, and its autoscaler."""

    def __init__(
        self,
        model: WorkerModel,
        policy: Policy,
        load: Callable[[float, float], Load],
        *,
        first_token_seconds: float,
    ) -> None:
        self._model, self._load = model, load
        self._scaling: ScalingPolicy | None = policy.scaling
        self._state = ScalingState()
        self._longest = first_token_seconds
        self._paper = PaperFleet(model, prefill=policy.prefill, decode=policy.decode)
        self._next_decision = 0.0
        self._workers = [policy.prefill, policy.decode]
        self.worker_seconds = [0.0, 0.0]
        """Seconds of the prefill and decode workers that were asked for."""
        self.actions: list[Action] = []
        self.at = 0.0
        first = load(0.0, 60.0)
        for _ in range(_WARM_UP):
            self._paper.advance(0.0, first)
            self._give_up(first)

    @property
    def state(self) -> PaperState:
        return self._paper.state

    def resume(self, fleet: SimulatedFleet, window: Window) -> None:
        """Continues after a window that has passed and is closed."""
        self._count(window.end - self.at)
        self.at = window.end
        self._paper.resume(_queued(fleet), _decoding(fleet), _evenness(window, self._model))

    def advance(self, until: float) -> None:
        """Advances to `until` in steps of a second. A last step of up to half a second lets no load
        pass, a longer one a whole second of it."""
        while self.at < until:
            then = min(self.at + _STEP, until)
            load = self._load(self.at, then)
            if then - self.at > _STEP / 2:
                self._paper.advance(then, load)
                self._give_up(load)
            self._count(then - self.at)
            self.at = then
            if self._scaling is not None and self.at >= self._next_decision:
                self._next_decision = self.at + self._scaling.interval
                self._decide(self._scaling)

    def _decide(self, scaling: ScalingPolicy) -> None:
        decision, self._state = decide(self._paper.measurements(self.at), scaling, self._state)
        self._workers = [decision.prefill.wanted, decision.decode.wanted]
        self._paper.resize(*self._workers, now=self.at)
        self.actions += changes(self.at, decision)

    def _count(self, seconds: float) -> None:
        for place, count in enumerate(self._workers):
            self.worker_seconds[place] += count * seconds

    def _give_up(self, load: Load) -> None:
        """Drops requests that have waited too long for a first token."""
        per_second = load.prompt_tokens / self._model.prefill_seconds(load.prompt_tokens)
        self._paper.give_up(self._paper.state.prefill * per_second * self._longest)


def changes(at: float, decision: Decision | ScalePlan) -> Iterator[Action]:
    """Yields the changes that a decision makes."""
    for role in (decision.prefill, decision.decode):
        if role.direction != "hold":
            yield Action(at, role.role.value, role.current, role.wanted, role.because)


# --- the start and the end of a window ----------------------------------------------------------


def _queued(fleet: SimulatedFleet) -> float:
    return float(
        sum(request.prompt for worker in fleet.prefill.values() for request in worker.queue)
    )


def _decoding(fleet: SimulatedFleet) -> int:
    return sum(sum(worker.load) + worker.incoming for worker in fleet.decode.values())


def _evenness(window: Window, model: WorkerModel) -> float:
    """Returns the output of all batches of a window, as a part of that of batches of mean size."""
    sizes = list(enumerate(window.seconds_in_batch))
    mean = sum(n * seconds for n, seconds in sizes) / window.decode_seconds
    if not mean:
        return 1.0
    emitted = sum(n / model.itl(n) * seconds for n, seconds in sizes)
    return emitted / (mean / model.itl(mean) * window.decode_seconds)


def match(
    fleet: SimulatedFleet, state: PaperState, like: Arrivals, draw: np.random.Generator
) -> None:
    """Brings the fleet to the state of the model: workers, batches, and queues that are longer than
    chance makes them. `like` has requests as they are at that time."""
    for role, wanted in ((Role.PREFILL, state.prefill), (Role.DECODE, state.decode)):
        more = wanted - fleet.count(role)
        for _ in range(more):
            fleet.add(role)
        if more < 0:
            fleet.take_away(role, -more)
    if not len(like):
        return
    _match_queues(fleet, state, like, draw)
    # Requests at prefill will reach decode by themselves.
    in_prefill = sum(sum(worker.load) for worker in fleet.prefill.values())
    more = round(state.decoding) - (_decoding(fleet) - in_prefill)
    if more > 0:
        _begin(fleet, more, like, draw)
    elif more < 0:
        _drop(fleet, -more, draw)


def _match_queues(
    fleet: SimulatedFleet, state: PaperState, like: Arrivals, draw: np.random.Generator
) -> None:
    mean = float(like.prompt.mean())
    per_second = state.prefill * mean / fleet.model.prefill_seconds(mean)
    more = state.queued_tokens - _queued(fleet)
    if more > 0 and state.queued_tokens > _CHANCE_SECONDS * per_second:
        waits = state.queued_tokens / per_second
        for place in draw.integers(len(like), size=math.ceil(more / mean)):
            prompt, output = int(like.prompt[place]), int(like.output[place])
            fleet.arrive(
                Request(fleet.now - waits * draw.random(), prompt, output, 0, counted=False)
            )
    elif -more > _CHANCE_SECONDS * per_second:
        surplus = -more - _CHANCE_SECONDS * per_second
        longest: list[PrefillWorker] = sorted(
            fleet.prefill.values(), key=lambda w: (-len(w.queue), w.name)
        )
        while surplus > 0 and any(worker.queue for worker in longest):
            for worker in longest:
                if worker.queue and surplus > 0:
                    surplus -= worker.queue[-1].prompt
                    fleet.withdraw(worker)


def _begin(fleet: SimulatedFleet, count: int, like: Arrivals, draw: np.random.Generator) -> None:
    """Begins requests in the middle of their answers: a long answer is met there more often than a
    short one, and at any of its tokens."""
    parts = like.output / like.output.sum()
    places = draw.choice(len(like), size=count, p=parts)
    left = np.maximum(np.ceil(like.output[places] * draw.random(count)), 1)
    fleet.begin_decoding(
        Request(fleet.now, int(like.prompt[place]), float(tokens), 0, counted=False)
        for place, tokens in zip(places, left, strict=True)
    )


def _drop(fleet: SimulatedFleet, count: int, draw: np.random.Generator) -> None:
    """Drops requests at random."""
    workers: list[DecodeWorker] = [w for w in fleet.decode.values() if w.batch]
    sizes = [len(worker.batch) for worker in workers]
    total = sum(sizes)
    gone = draw.choice(total, size=min(count, total), replace=False)
    ends = np.cumsum(sizes)
    owners = np.searchsorted(ends, gone, side="right")
    for owner in np.unique(owners):
        first = ends[owner] - sizes[owner]
        fleet.drop(workers[owner], [int(place - first) for place in gone[owners == owner]])
