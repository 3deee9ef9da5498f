"""The settings of a run: its measurements, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvxfer.bench.cases import Case
from kvxfer.bench.pages import PageDraw
from kvxfer.errors import InvalidArgument

CPU_PAGE_BYTES = (1 << 10, 256 << 10)
# The timeout of both engines. It is long, as probes that spin take the processors for themselves.
PEER_TIMEOUT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class LatencySettings:
    """The settings of a latency's measurement. `gap_ns` 0 is back to back, so that both engines
    stay awake; 5 ms lets them fall asleep."""

    gap_ns: int
    rounds: int
    writes: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in bytes. Throughput takes `rounds` per page size, of `requests` each. The
    first one only wakes both processes."""

    cases: tuple[Case, ...]
    page_bytes: tuple[int, ...]
    request_bytes: int
    pool_bytes: int
    rounds: int
    seed: int
    requests: int
    latency: tuple[LatencySettings, ...]
    connect_rounds: int
    registration_bytes: int
    registration_rounds: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument for what cannot be measured."""
        if not self.page_bytes:
            raise InvalidArgument("no page size given; use sizes such as 1,4,16")
        for size in self.page_bytes:
            if size <= 0 or self.request_bytes % size or self.pool_bytes % size:
                raise InvalidArgument(
                    f"pages of {size} bytes do not divide requests of {self.request_bytes} and "
                    f"pools of {self.pool_bytes} bytes; use page sizes that do"
                )
        if self.request_bytes * self.requests > self.pool_bytes:
            raise InvalidArgument(
                f"the {self.requests} requests of a round, {self.request_bytes} bytes each, do "
                f"not fit pools of {self.pool_bytes} bytes; use a larger pool"
            )

    def draw(self, page_bytes: int) -> PageDraw:
        """Returns the requests of one round."""
        return PageDraw(self.seed, page_bytes, self.request_bytes, self.pool_bytes, self.requests)

    def sweep(self, page_bytes: int) -> PageDraw:
        """Returns as many requests as the pool has room for: each page at most once."""
        requests = self.pool_bytes // self.request_bytes
        return PageDraw(self.seed, page_bytes, self.request_bytes, self.pool_bytes, requests)

    @property
    def fabrics(self) -> tuple[str, ...]:
        """The engine's fabrics that the cases need, each once."""
        return tuple(dict.fromkeys(case.fabric for case in self.cases))

    @property
    def steps(self) -> int:
        """The number of progress reports of a run that skips nothing."""
        per_case = (
            len(CPU_PAGE_BYTES)
            + len(self.page_bytes) * (self.rounds + 1)
            + sum(latency.rounds for latency in self.latency)
        )
        return (
            len(self.cases) * per_case
            + len(self.fabrics) * self.connect_rounds
            + self.registration_rounds
            + len(self.page_bytes) * self.rounds
        )


def full_settings(
    *,
    cases: tuple[Case, ...],
    seed: int,
    request_bytes: int,
    page_bytes: tuple[int, ...] | None = None,
    pool_bytes: int | None = None,
    rounds: int | None = None,
) -> Settings:
    """Returns the settings of published figures: a few minutes on two cores."""
    return Settings(
        cases=cases,
        page_bytes=page_bytes
        if page_bytes is not None
        else tuple(size << 10 for size in (1, 4, 16, 64, 256)),
        request_bytes=request_bytes,
        pool_bytes=pool_bytes or 1 << 30,
        rounds=rounds or 7,
        seed=seed,
        requests=4,
        latency=(
            LatencySettings(gap_ns=0, rounds=5, writes=400),
            LatencySettings(gap_ns=5_000_000, rounds=5, writes=60),
        ),
        connect_rounds=20,
        registration_bytes=1 << 30,
        registration_rounds=3,
    )


def quick_settings(
    *,
    cases: tuple[Case, ...],
    seed: int,
    request_bytes: int,
    page_bytes: tuple[int, ...] | None = None,
    pool_bytes: int | None = None,
    rounds: int | None = None,
) -> Settings:
    """Returns settings that measure everything once, in seconds: a test, not published figures."""
    return Settings(
        cases=cases,
        page_bytes=page_bytes if page_bytes is not None else (1 << 10, 64 << 10),
        request_bytes=request_bytes,
        pool_bytes=pool_bytes or 256 << 20,
        rounds=rounds or 3,
        seed=seed,
        requests=2,
        latency=(
            LatencySettings(gap_ns=0, rounds=2, writes=100),
            LatencySettings(gap_ns=5_000_000, rounds=2, writes=10),
        ),
        connect_rounds=5,
        registration_bytes=256 << 20,
        registration_rounds=1,
    )
