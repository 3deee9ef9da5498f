"""Figures of one run, as they are printed and as JSON has them. Times in milliseconds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from kvxfer.bench.figures import Machine

TARGET_TOKENS: Final = 2000
TARGET_RATIO: Final = 0.5
"""Visible transfer, kvxfer's push against vLLM's NixlConnector."""
TARGET_TTFT: Final = 1.0
"""Time to the first token, push against pull."""
TARGET_IDLE: Final = 0.01
"""Of one core, beyond what vLLM takes without a connector."""
QUIET: Final = "with KVXFER_VLLM_QUEUE_SPIN_SECONDS"
TARGET_WAITING: Final = 0.25
"""Of one core, both servers, while a push waits and readers of vLLM's queue sleep."""
CROWD: Final = 64
"""Requests in one step of prefill."""
TARGET_LAYER_US: Final = 20.0
"""Microseconds of the forward's thread per layer, with a crowd."""


class Mode(enum.StrEnum):
    AGGREGATED = "aggregated"
    PUSH = "kvxfer, push"
    PULL = "kvxfer, pull"
    NIXL = "NixlConnector"


@dataclass(frozen=True, slots=True)
class Split:
    """Where the time to the first token went; the parts add up to it."""

    until_prefill: float
    """From the client's request to prefill's first step."""
    prefill: float
    """To the last layer of the prompt's last step."""
    visible_transfer: float
    """To decode's first step with the request."""
    first_decode_step: float
    """To the first token at the client."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    round: int
    prompt_tokens: int
    mode: Mode
    ttft: float
    split: Split | None
    """None of an aggregated server."""


@dataclass(frozen=True, slots=True)
class Spread:
    p50: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        return cls(median(ordered), ordered[round(0.9 * (len(ordered) - 1))])


@dataclass(frozen=True, slots=True)
class Figure:
    """All requests of one length in one mode."""

    prompt_tokens: int
    mode: Mode
    ttft: Spread
    ttft_ratio: float
    """To the aggregated server's in the round of the same number, in the median."""
    until_prefill: Spread | None = None
    prefill: Spread | None = None
    visible_transfer: Spread | None = None
    first_decode_step: Spread | None = None


@dataclass(frozen=True, slots=True)
class ForwardThread:
    """What kvxfer takes of the thread of a forward that computes for many requests, in
    microseconds."""

    requests: int
    layer: float
    """For one layer, in the median."""
    before: float
    """Before the first layer, for each request."""


@dataclass(frozen=True, slots=True)
class VllmReport:
    started_at: str
    machine: Machine
    load_average: float
    rounds: int
    figures: list[Figure]
    visible_ratio: float
    """Visible transfer of kvxfer's push against NixlConnector's, medians, at TARGET_TOKENS."""
    ttft_ratio: float
    """Time to the first token of push against pull, median over the rounds, at TARGET_TOKENS."""
    forward_thread: ForwardThread
    idle_cores: dict[str, float]
    """By server, in parts of one core."""
    waiting_cores: dict[str, float]
    """Of both servers while one push waits: without waits in steps that compute nothing, with them,
    and with readers of vLLM's queue that sleep, too."""
    samples: list[Sample]

    @property
    def met(self) -> bool:
        return self.visible_ratio <= TARGET_RATIO and self.ttft_ratio < TARGET_TTFT


def figures_of(samples: Sequence[Sample]) -> list[Figure]:
    base = {(s.round, s.prompt_tokens): s.ttft for s in samples if s.mode is Mode.AGGREGATED}
    made = []
    for prompt_tokens in sorted({sample.prompt_tokens for sample in samples}):
        for mode in Mode:
            of = [s for s in samples if (s.prompt_tokens, s.mode) == (prompt_tokens, mode)]
            splits = [sample.split for sample in of if sample.split is not None]
            parts = {
                part: Spread.of([getattr(split, part) for split in splits])
                for part in Split.__dataclass_fields__
                if splits
            }
            ratio = median(s.ttft / base[s.round, prompt_tokens] for s in of)
            spread = Spread.of([sample.ttft for sample in of])
            made.append(Figure(prompt_tokens, mode, spread, ratio, **parts))
    return made


def visible_ratio(samples: Sequence[Sample], prompt_tokens: int) -> float:
    push, nixl = (
        median(
            sample.split.visible_transfer
            for sample in samples
            if (sample.prompt_tokens, sample.mode) == (prompt_tokens, mode) and sample.split
        )
        for mode in (Mode.PUSH, Mode.NIXL)
    )
    return push / nixl


def ttft_ratio(samples: Sequence[Sample], prompt_tokens: int) -> float:
    of = {(s.round, s.mode): s.ttft for s in samples if s.prompt_tokens == prompt_tokens}
    return median(of[n, Mode.PUSH] / of[n, mode] for n, mode in of if mode is Mode.PULL)
