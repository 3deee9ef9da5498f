"""The resources that a process holds over time, and whether they grow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

# Caches, pools and the heap fill first: this share of a run, and at least these seconds, do not
# count.
_WARM_UP: Final = 0.3
_WARM_UP_SECONDS: Final = 180.0
# The shortest time whose samples show a slope.
_LEAST_SECONDS: Final = 90.0
# The time is divided into this number of parts. Consecutive samples depend on each other; the means
# of the parts do not.
_PARTS: Final = 10
# Memory grows if the line rises by more than this many MiB over a run, and by more than noise.
_ALLOWED: Final = 2.0


@dataclass(frozen=True, slots=True)
class Held:
    """The anonymous resident memory in MiB, the open file descriptors, and the threads of a
    process."""

    memory: float
    fds: int
    threads: int


def held_by(pid: int) -> Held:
    process = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    return Held(
        memory=int(status["RssAnon"].split()[0]) / 1024,
        fds=sum(1 for _ in (process / "fd").iterdir()),
        threads=int(status["Threads"]),
    )


@dataclass(frozen=True, slots=True)
class Slope:
    """A line through the memory samples of one process after the warm-up, in MiB."""

    last: float
    per_hour: float
    error_per_hour: float
    """The standard error of the slope."""
    growth: float
    """The growth over the time after the warm-up."""

    @property
    def flat(self) -> bool:
        return self.growth <= _ALLOWED or self.per_hour <= 3 * self.error_per_hour


def memory_slope(samples: list[tuple[float, Held]]) -> Slope | None:
    """Fits a line to `samples`: times in seconds and resources, in order. Returns None if the run
    was too short."""
    begun, ended = samples[0][0], samples[-1][0]
    warm = begun + max(_WARM_UP * (ended - begun), _WARM_UP_SECONDS)
    if ended - warm < _LEAST_SECONDS:
        return None
    counted = [(at, held) for at, held in samples if at >= warm]
    parts = np.array_split(np.arange(len(counted)), min(_PARTS, len(counted)))

    def means(values: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([np.mean(np.take(values, part)) for part in parts])

    hours = means([at / 3600 for at, _ in counted])
    centred = hours - hours.mean()
    spread = float((centred**2).sum())
    values = means([held.memory for _, held in counted])
    slope = float((centred * values).sum()) / spread
    rest = values - values.mean() - slope * centred
    return Slope(
        last=counted[-1][1].memory,
        per_hour=slope,
        error_per_hour=float(np.sqrt((rest**2).sum() / max(len(values) - 2, 1) / spread)),
        growth=slope * (counted[-1][0] - counted[0][0]) / 3600,
    )
