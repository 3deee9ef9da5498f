"""What a process holds over time, and whether it grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

# The beginning does not count: caches, pools and connections fill.
_WARM_UP: Final = 0.3
# Workers that come and go take a few file descriptors for a while: samples that follow one another
# say the same. Means over so many parts of the time do not.
_PARTS: Final = 10
# More than this over a run, and more than noise: it grows.
_ALLOWED: Final = {"memory": 2.0, "fds": 4.0, "threads": 2.0}


@dataclass(frozen=True, slots=True)
class Held:
    """MiB of resident memory of its own, open file descriptors, threads."""

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
    """Of one quantity of one process: a line through its samples after the warm-up."""

    what: str
    last: float
    per_hour: float
    error_per_hour: float
    """Standard error of the slope."""
    growth: float
    """Over the time that counts."""

    @property
    def flat(self) -> bool:
        noise = 3 * self.error_per_hour
        return self.growth <= _ALLOWED[self.what] or self.per_hour <= noise


def slopes(samples: list[tuple[float, Held]]) -> list[Slope]:
    """`samples`: seconds and what was held then, in order."""
    counted = samples[int(len(samples) * _WARM_UP) :]
    parts = np.array_split(np.arange(len(counted)), min(_PARTS, len(counted)))

    def means(values: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([np.mean(np.take(values, part)) for part in parts])

    hours = means([at / 3600 for at, _ in counted])
    centred = hours - hours.mean()
    spread = float((centred**2).sum())
    found = []
    for what in _ALLOWED:
        values = means([float(getattr(held, what)) for _, held in counted])
        slope = float((centred * values).sum()) / spread
        rest = values - values.mean() - slope * centred
        error = float(np.sqrt((rest**2).sum() / max(len(values) - 2, 1) / spread))
        growth = slope * (counted[-1][0] - counted[0][0]) / 3600
        last = float(getattr(counted[-1][1], what))
        found.append(Slope(what, last, slope, error, growth))
    return found
