"""The figures of one run, for tables and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from kvxfer.bench.machine import Machine
from kvxfer.bench.targets import (
    ROUTER_FIRST_BYTE,
    ROUTER_STREAM,
    ROUTER_TOKEN,
    Verdict,
    judge,
)

ROUTER: Final = "router"
PASS_THROUGH: Final = "pass-through"
OPEN: Final = "control plane, open a transfer"
TOKENIZE: Final = "prefill worker, tokenize"
PREFILL: Final = "prefill worker, one token"
DECODE: Final = "decode worker, first token"


@dataclass(frozen=True, slots=True)
class Round:
    """The streams of one round over one server, from the first request to the last byte."""

    seconds: float
    tokens: int
    parts: int
    """HTTP chunks that the tokens came in."""
    cpu_seconds: float
    """Processor time of the server."""
    steady_tokens: int
    """Tokens that came while all streams were under way."""
    steady_cpu_seconds: float
    client_cpu_seconds: float

    @property
    def token_us(self) -> float:
        """Processor time of a token, in microseconds, without begin and end of a request."""
        return self.steady_cpu_seconds / self.steady_tokens * 1e6

    @property
    def whole_us(self) -> float:
        """Processor time of whole requests, in microseconds per token."""
        return self.cpu_seconds / self.tokens * 1e6


@dataclass(frozen=True, slots=True)
class StreamFigure:
    """The streams over one server: medians of the rounds."""

    token_us: float
    whole_us: float
    streams_per_core: float
    """Streams that take all of a core, with their whole requests."""
    tokens_per_part: float
    """Tokens in an HTTP chunk. Above 1 the server was late, and passed several on at once."""
    core_share: float
    """The server's share of its core."""
    client_cores: float
    """Processor time of the load generator per second, at most. At 1 it is the bottleneck."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of sequential requests."""

    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class RouterReport:
    started_at: str
    machine: Machine
    rounds: int
    streams: int
    tokens: int
    """The tokens of each stream."""
    rate: float
    """Tokens per second of each stream."""
    figures: Mapping[str, StreamFigure]
    """The figures of the router and the pass-through."""
    latencies: Mapping[str, Latency]
    """The latencies by what was asked: to the first byte of a stream, to the end of another
    answer."""
    verdicts: Sequence[Verdict]

    @property
    def passed(self) -> bool:
        return all(each.met or not each.target.required for each in self.verdicts)


def stream_figure(rounds: Sequence[Round], rate: float) -> StreamFigure:
    """Returns the figure of streams of `rate` tokens per second."""
    whole_us = median(each.whole_us for each in rounds)
    return StreamFigure(
        token_us=median(each.token_us for each in rounds),
        whole_us=whole_us,
        streams_per_core=1e6 / (whole_us * rate),
        tokens_per_part=median(each.tokens / each.parts for each in rounds),
        core_share=median(each.cpu_seconds / each.seconds for each in rounds),
        client_cores=max(each.client_cpu_seconds / each.seconds for each in rounds),
    )


def latency(seconds: Sequence[float]) -> Latency:
    p50, p90 = np.percentile(seconds, (50, 90))
    return Latency(float(p50) * 1e3, float(p90) * 1e3)


def added_ms(latencies: Mapping[str, Latency]) -> float:
    """Returns the milliseconds that the router adds to the first byte, above the pass-through.

    The router waits for the control plane and for the prompt's tokens in turn. It asks both workers
    at once, so of these only the slower one counts.
    """
    p50 = {name: each.p50 for name, each in latencies.items()}
    router = p50[ROUTER] - p50[OPEN] - p50[TOKENIZE] - max(p50[PREFILL], p50[DECODE])
    return router - (p50[PASS_THROUGH] - p50[DECODE])


def verdicts_of(
    rounds: Mapping[str, Sequence[Round]], latencies: Mapping[str, Latency]
) -> list[Verdict]:
    """Judges the targets. Ratios are medians of those of neighbouring rounds."""
    pairs = list(zip(rounds[ROUTER], rounds[PASS_THROUGH], strict=True))
    return [
        judge(median(our.token_us / least.token_us for our, least in pairs), ROUTER_TOKEN),
        judge(median(our.whole_us / least.whole_us for our, least in pairs), ROUTER_STREAM),
        judge(added_ms(latencies), ROUTER_FIRST_BYTE),
    ]
