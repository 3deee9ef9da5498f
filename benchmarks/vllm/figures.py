"""The figures of one run, for tables and for JSON. Times in milliseconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from kvxfer.bench.machine import Machine
from kvxfer.bench.targets import (
    FIRST_TOKEN,
    IDLE_VLLM,
    LAYER,
    VISIBLE_TRANSFER,
    VLLM_PROMPT_TOKENS,
    WAITING_VLLM,
    Verdict,
    judge,
)

QUIET: Final = "workers wait, readers of vLLM's queue sleep"


class Mode(enum.StrEnum):
    AGGREGATED = "aggregated"
    PUSH = "kvxfer, push"
    PULL = "kvxfer, pull"
    NIXL = "NixlConnector"


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of the time to the first token; they add up to it."""

    until_prefill: float
    """The time from the client's request to prefill's first step."""
    prefill: float
    """The time from there to the last layer of the prompt's last step."""
    visible_transfer: float
    """The time from there to decode's first step with the request."""
    first_decode_step: float
    """The time from there to the first token at the client."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    round: int
    prompt_tokens: int
    mode: Mode
    ttft: float
    split: Split | None
    """The parts of `ttft`; None for an aggregated server."""


@dataclass(frozen=True, slots=True)
class Spread:
    p50: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        p50, p90 = np.percentile(values, (50, 90))
        return cls(float(p50), float(p90))


@dataclass(frozen=True, slots=True)
class Figure:
    """All requests of one length in one mode."""

    prompt_tokens: int
    mode: Mode
    ttft: Spread
    ttft_ratio: float
    """The median ratio to the aggregated server's time in the same round."""
    until_prefill: Spread | None = None
    prefill: Spread | None = None
    visible_transfer: Spread | None = None
    first_decode_step: Spread | None = None


@dataclass(frozen=True, slots=True)
class ForwardThread:
    """The time of the forward's thread that kvxfer uses, in microseconds, in a forward for many
    requests."""

    requests: int
    layer: float
    """The median time for one layer."""
    before: float
    """The time before the first layer, for each request."""


@dataclass(frozen=True, slots=True)
class VllmReport:
    started_at: str
    machine: Machine
    rounds: int
    figures: list[Figure]
    forward_thread: ForwardThread
    idle_cores: dict[str, float]
    """The processor time by server, as shares of one core."""
    waiting_cores: dict[str, float]
    """The share of both servers while one push waits, by the kind of wait."""
    samples: list[Sample]
    verdicts: list[Verdict]

    @property
    def passed(self) -> bool:
        return all(each.met or not each.target.required for each in self.verdicts)


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


def verdicts_of(
    samples: Sequence[Sample],
    forward_thread: ForwardThread,
    idle_cores: Mapping[str, float],
    waiting_cores: Mapping[str, float],
) -> list[Verdict]:
    aggregated = idle_cores[Mode.AGGREGATED]
    connected = max(cores for name, cores in idle_cores.items() if name != Mode.AGGREGATED)
    return [
        judge(_visible_ratio(samples), VISIBLE_TRANSFER),
        judge(_ttft_ratio(samples), FIRST_TOKEN),
        judge(forward_thread.layer, LAYER),
        judge(100 * (connected - aggregated), IDLE_VLLM),
        judge(100 * waiting_cores[QUIET], WAITING_VLLM),
    ]


def _visible_ratio(samples: Sequence[Sample]) -> float:
    """Returns the ratio of medians."""
    push, nixl = (
        median(
            sample.split.visible_transfer
            for sample in samples
            if (sample.prompt_tokens, sample.mode) == (VLLM_PROMPT_TOKENS, mode) and sample.split
        )
        for mode in (Mode.PUSH, Mode.NIXL)
    )
    return push / nixl


def _ttft_ratio(samples: Sequence[Sample]) -> float:
    """Returns the median over the rounds."""
    of = {(s.round, s.mode): s.ttft for s in samples if s.prompt_tokens == VLLM_PROMPT_TOKENS}
    return median(of[n, Mode.PUSH] / of[n, mode] for n, mode in of if mode is Mode.PULL)
