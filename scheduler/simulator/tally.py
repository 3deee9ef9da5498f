"""The counts of a simulation, window by window, and their totals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.simulator.workload import Floats

PERCENTS: Final = (50, 90, 95, 99)


@dataclass(slots=True)
class Window:
    """A part of the time; its requests between `start` and `end` are simulated."""

    begins: float
    ends: float
    start: float
    end: float
    expected: float
    """Requests of the workload from `begins` to `ends`."""
    arrived: int = 0
    refused: int = 0
    """Requests that got no pair in time."""
    late: int = 0
    """Requests that got no token in time."""
    ttft: list[float] = field(default_factory=list)
    finished: int = 0
    good: int = 0
    """Requests that kept both targets."""
    prefill_wait: float = 0.0
    prefill_waited: int = 0
    decode_wait: float = 0.0
    decode_waited: int = 0
    cached: int = 0
    """Tokens of prompts that were not computed, as they were cached."""
    prompt: int = 0
    seconds_in_batch: list[float] = field(default_factory=list)
    """Seconds of all decode workers, by the size of the batch."""
    prefill_busy: float = 0.0
    prefill_seconds: float = 0.0
    """Seconds of ready workers."""
    decode_seconds: float = 0.0
    prefill_workers: int = 0
    decode_workers: int = 0

    @property
    def weight(self) -> float:
        """Requests that each simulated one stands for."""
        return self.expected / self.arrived if self.arrived else 0.0

    @property
    def time_weight(self) -> float:
        return (self.ends - self.begins) / (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Action:
    """A scaling decision that changed a count."""

    at: float
    role: str
    before: int
    after: int
    because: str


@dataclass(frozen=True, slots=True)
class Point:
    """One window in the course of time. None means that nothing was measured in it."""

    at: float
    requests_per_second: float
    prefill_workers: int
    decode_workers: int
    ttft_p90: float | None
    itl_p90: float | None
    goodput: float | None


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one policy. Percentiles are by percent, in seconds; parts are of 1."""

    policy: str
    seconds: float
    requests: float
    simulated: int
    windows: int
    sampled: bool
    """Whether the time between the windows was modelled on paper."""
    ttft: dict[int, float | None]
    itl: dict[int, float | None]
    good: float
    """The part of the requests that kept both targets."""
    good_error: float | None
    """Half of the 95 % confidence interval of `good` if windows are a sample."""
    goodput: float
    """Requests per second that kept both targets."""
    output_tokens_per_second: float
    refused: float
    late: float
    prefill_wait: float
    """Seconds in prefill's queue, on average."""
    prefill_waited: float
    """The part of the requests that had to wait there."""
    decode_wait: float
    decode_waited: float
    cached: float
    """The part of the prompts' tokens that was found in a prefix cache."""
    prefill_busy: float
    """The part of their time that ready prefill workers computed."""
    decode_batch: float
    """Requests in the batch of a ready decode worker, on average over time."""
    prefill_hours: float
    decode_hours: float
    gpu_hours: float
    cost: float
    actions: tuple[Action, ...]
    course: tuple[Point, ...]


def percentiles(
    values: Floats, weights: Floats, percents: Sequence[int] = PERCENTS
) -> dict[int, float | None]:
    """Returns the smallest values that at least `percents` of the weight do not exceed."""
    kept = weights > 0
    values, weights = values[kept], weights[kept]
    if not len(values):
        return dict.fromkeys(percents)
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    places = np.searchsorted(reached, np.array(percents) / 100 * reached[-1] * (1 - 1e-12))
    return {
        percent: float(values[order[place]])
        for percent, place in zip(percents, places, strict=True)
    }


def ttft_percentiles(windows: Iterable[Window]) -> dict[int, float | None]:
    windows = list(windows)
    values = np.concatenate([np.array(window.ttft, dtype=float) for window in windows])
    weights = np.repeat([w.weight for w in windows], [len(w.ttft) for w in windows])
    return percentiles(values, np.asarray(weights, dtype=float))


def itl_percentiles(windows: Iterable[Window], model: WorkerModel) -> dict[int, float | None]:
    """Returns the percentiles over all tokens: a batch of n emits n / ITL(n) tokens per second."""
    tokens: dict[int, float] = {}
    for window in windows:
        for size, seconds in enumerate(window.seconds_in_batch):
            if seconds:
                emitted = seconds * size / model.itl(size) * window.time_weight
                tokens[size] = tokens.get(size, 0.0) + emitted
    sizes = sorted(tokens)
    return percentiles(
        np.array([model.itl(size) for size in sizes]), np.array([tokens[size] for size in sizes])
    )


def summarise(
    windows: Sequence[Window],
    *,
    policy: str,
    model: WorkerModel,
    sampled: bool,
    prefill_hours: float,
    decode_hours: float,
    gpus: float,
    cost_per_hour: float,
    actions: Iterable[Action],
) -> Results:
    seconds = windows[-1].ends - windows[0].begins

    def by_requests(of: Callable[[Window], float]) -> float:
        return sum(of(window) * window.weight for window in windows)

    def by_time(of: Callable[[Window], float]) -> float:
        return sum(of(window) * window.time_weight for window in windows)

    # Requests that had not ended with the last window do not count.
    ended = by_requests(_ended)
    begun = by_requests(lambda w: len(w.ttft))
    started = by_requests(lambda w: w.prompt)
    good = _part(by_requests(lambda w: w.good), ended)
    requests = sum(window.expected for window in windows)
    gpu_hours = (prefill_hours + decode_hours) * gpus
    return Results(
        policy=policy,
        seconds=seconds,
        requests=requests,
        simulated=sum(window.arrived for window in windows),
        windows=len(windows),
        sampled=sampled,
        ttft=ttft_percentiles(windows),
        itl=itl_percentiles(windows, model),
        good=good,
        good_error=_error(windows, good) if sampled else None,
        goodput=good * requests / seconds,
        output_tokens_per_second=by_time(
            lambda w: sum(s * n / model.itl(n) for n, s in enumerate(w.seconds_in_batch))
        )
        / seconds,
        refused=_part(by_requests(lambda w: w.refused), ended),
        late=_part(by_requests(lambda w: w.late), ended),
        prefill_wait=_part(by_requests(lambda w: w.prefill_wait), begun),
        prefill_waited=_part(by_requests(lambda w: w.prefill_waited), begun),
        decode_wait=_part(by_requests(lambda w: w.decode_wait), begun),
        decode_waited=_part(by_requests(lambda w: w.decode_waited), begun),
        cached=_part(by_requests(lambda w: w.cached), started),
        prefill_busy=_part(by_time(lambda w: w.prefill_busy), by_time(lambda w: w.prefill_seconds)),
        decode_batch=_part(
            by_time(lambda w: sum(n * s for n, s in enumerate(w.seconds_in_batch))),
            by_time(lambda w: w.decode_seconds),
        ),
        prefill_hours=prefill_hours,
        decode_hours=decode_hours,
        gpu_hours=gpu_hours,
        cost=gpu_hours * cost_per_hour,
        actions=tuple(actions),
        course=tuple(_point(window, model) for window in windows),
    )


def _ended(window: Window) -> int:
    return window.finished + window.refused + window.late


def _part(of: float, all_: float) -> float:
    return of / all_ if all_ else 0.0


def _error(windows: Sequence[Window], good: float) -> float | None:
    """Returns the error of a ratio over windows that were drawn one from each stratum, as if from
    all alike: the strata can only make it smaller (Cochran, Sampling Techniques, section 6.4)."""
    weights = np.array([w.weight * _ended(w) for w in windows])
    if len(windows) < 2 or not weights.sum():
        return None
    residuals = np.array([w.weight * (w.good - good * _ended(w)) for w in windows])
    count = len(windows)
    variance = count / (count - 1) * float(residuals @ residuals) / float(weights.sum()) ** 2
    return 1.96 * math.sqrt(variance)


def _point(window: Window, model: WorkerModel) -> Point:
    ended = _ended(window)
    return Point(
        at=window.begins,
        requests_per_second=window.expected / (window.ends - window.begins),
        prefill_workers=window.prefill_workers,
        decode_workers=window.decode_workers,
        ttft_p90=ttft_percentiles([window])[90],
        itl_p90=itl_percentiles([window], model)[90],
        goodput=window.good / ended if ended else None,
    )
