"""The requests of a simulation: when they arrive, how long they are, which prefixes they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from kvxfer.scheduler.scaling.trace import Load

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

# Requests are drawn in pieces of this many seconds, each with a separate seed: the requests do not
# depend on the parts of the day that are looked at.
_PIECE_SECONDS: Final = 10
_SIGMA_PROMPT: Final = 1.0
_SIGMA_OUTPUT: Final = 0.8
_SWING: Final = 0.4
_PEAK_HOUR: Final = 14.0
_BURSTS_PER_DAY: Final = 8.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order of their arrival."""

    at: Floats
    """Seconds from the beginning of the workload."""
    prompt: Ints
    output: Ints
    hashes: tuple[tuple[int, ...], ...] | None = None
    """The chain hashes of each request's prompt."""

    def __len__(self) -> int:
        return len(self.at)

    def slice(self, start: int, end: int) -> Arrivals:
        return Arrivals(
            self.at[start:end],
            self.prompt[start:end],
            self.output[start:end],
            None if self.hashes is None else self.hashes[start:end],
        )


class Workload(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    @property
    def tokens_per_hash(self) -> int | None:
        """The tokens of each hash; None if common prefixes are unknown."""

    def expected(self, start: float, end: float) -> float:
        """Returns the number of requests from `start` to `end`, on average over all draws."""

    def between(self, start: float, end: float) -> Iterator[Arrivals]:
        """Yields the requests from `start` to `end`, in pieces that fit into memory."""

    def load(self, start: float, end: float) -> Load:
        """Returns the load from `start` to `end`."""


class GeneratedDay:
    """Poisson arrivals around a curve with one peak a day, with bursts; lengths are log-normal.

    Bursts come 8 times a day on average, last 2 to 10 minutes with ramps of 30 s, and multiply the
    rate by 1.3 to 2. The curve swings by 40 % around the mean and is highest at 14:00; it
    begins at midnight. Medians lie below the means: a prompt of 2,000 tokens on average has a
    median of 1,213 and a 99th percentile of 12,400.
    """

    tokens_per_hash: int | None = None

    def __init__(
        self,
        *,
        hours: float,
        requests_per_second: float,
        prompt_tokens: float = 2000.0,
        output_tokens: float = 250.0,
        bursts: bool = True,
        seed: int = 0,
    ) -> None:
        self.name = f"generated, seed {seed}"
        self.seconds = hours * 3600
        self._seed = seed
        self._prompt, self._output = prompt_tokens, output_tokens
        whole = np.arange(int(np.ceil(self.seconds)))
        hour = whole / 3600
        curve = 1 + _SWING * np.cos((hour - _PEAK_HOUR) * (2 * np.pi / 24))
        if bursts:
            curve = curve * self._bursts(whole)
        self._rates = requests_per_second * curve
        self._until = np.concatenate(([0.0], np.cumsum(self._rates)))

    def _bursts(self, second: Ints) -> Floats:
        draw = np.random.default_rng([self._seed, 1])
        factor = np.ones(len(second))
        for _ in range(draw.poisson(_BURSTS_PER_DAY * self.seconds / 86_400)):
            start, lasts = draw.uniform(0, self.seconds), draw.uniform(120, 600)
            height = draw.uniform(0.3, 1.0)
            ramp = np.minimum(second - start, start + lasts - second) / 30
            factor = np.maximum(factor, 1 + height * np.clip(ramp, 0, 1))
        return factor

    def expected(self, start: float, end: float) -> float:
        return self._arrived(end) - self._arrived(start)

    def _arrived(self, until: float) -> float:
        whole = min(int(until), len(self._rates) - 1)
        return float(self._until[whole] + (until - whole) * self._rates[whole])

    def between(self, start: float, end: float) -> Iterator[Arrivals]:
        for piece in range(int(start // _PIECE_SECONDS), int(np.ceil(end / _PIECE_SECONDS))):
            drawn = self._draw(piece)
            low, high = np.searchsorted(drawn.at, (start, end))
            if high > low:
                yield drawn.slice(int(low), int(high))

    def _draw(self, piece: int) -> Arrivals:
        draw = np.random.default_rng([self._seed, 2, piece])
        first = piece * _PIECE_SECONDS
        counts = draw.poisson(self._rates[first : first + _PIECE_SECONDS])
        total = int(counts.sum())
        at = np.sort(first + np.repeat(np.arange(len(counts)), counts) + draw.random(total))
        return Arrivals(
            at[at < self.seconds],
            _lengths(draw, self._prompt, _SIGMA_PROMPT, total),
            _lengths(draw, self._output, _SIGMA_OUTPUT, total),
        )

    def load(self, start: float, end: float) -> Load:
        rate = self.expected(start, end) / max(end - start, 1e-9)
        return Load(rate, self._prompt, self._output)


def _lengths(draw: np.random.Generator, mean: float, sigma: float, count: int) -> Ints:
    drawn = draw.lognormal(np.log(mean) - sigma * sigma / 2, sigma, count)
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


class RecordedRequests:
    """The requests of a trace."""

    def __init__(self, name: str, arrivals: Arrivals, *, tokens_per_hash: int | None) -> None:
        self.name = name
        self.tokens_per_hash = tokens_per_hash
        self._arrivals = arrivals
        self.seconds = float(np.floor(arrivals.at[-1])) + 1.0

    def expected(self, start: float, end: float) -> float:
        low, high = np.searchsorted(self._arrivals.at, (start, end))
        return float(high - low)

    def between(self, start: float, end: float) -> Iterator[Arrivals]:
        low, high = np.searchsorted(self._arrivals.at, (start, end))
        if high > low:
            yield self._arrivals.slice(int(low), int(high))

    def load(self, start: float, end: float) -> Load:
        low, high = np.searchsorted(self._arrivals.at, (start, end))
        among = self._arrivals.slice(int(low), int(high)) if high > low else self._arrivals
        rate = float(high - low) / max(end - start, 1e-9)
        return Load(rate, float(among.prompt.mean()), float(among.output.mean()))
