"""The autoscaler's policy: targets, bounds and patience."""

from __future__ import annotations

import math
from typing import Any

import msgspec


def _require(holds: bool, name: str, value: Any, remedy: str) -> None:
    if not holds:
        # msgspec turns a ValueError into an error that names the path to the value.
        raise ValueError(f"{name} is {value}; write {remedy}")


class RolePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets and bounds of one role. A target that is left out keeps its rule silent."""

    min: int = 1
    max: int = 8
    latency: float | None = None
    """The target of the 90th percentile in seconds: TTFT at prefill, inter-token at decode."""
    tokens_per_second: float | None = None
    """The tokens that one worker computes per second within the latency target, from a benchmark:
    tokens of prompts at prefill, tokens of output at decode."""
    utilisation: float = 0.8
    """The part of `tokens_per_second` to plan with."""
    requests: float | None = 8.0
    """The target of a worker's requests, running and waiting."""
    occupancy: float | None = 0.8
    """The target of the part of a worker's KV blocks in use."""
    backlog: float | None = 8.0
    """The target of a worker's transfers, opened and not yet begun at decode."""

    def __post_init__(self) -> None:
        _require(self.min >= 1, "min", self.min, "1 or more: nothing is measured without a worker")
        _require(self.max >= self.min, "max", self.max, f"{self.min} or more, as min is")
        for name in ("latency", "tokens_per_second", "requests", "backlog"):
            value = getattr(self, name)
            _require(value is None or 0 < value < math.inf, name, value, "a number above 0")
        for name in ("utilisation", "occupancy"):
            value = getattr(self, name)
            _require(value is None or 0 < value <= 1, name, value, "above 0, at most 1")


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole policy. Durations are in seconds."""

    model: str | None = None
    """Only workers of this model count; None counts all."""
    interval: float = 10.0
    """The time between two decisions."""
    tolerance: float = 0.05
    """A demand above the count by no more than this part changes nothing."""
    step_up: int = 4
    """The most workers that one decision adds."""
    step_down: int = 1
    """The most workers that one decision takes away."""
    cooldown_up: float = 30.0
    """The time between two decisions that add workers of one role."""
    cooldown_down: float = 60.0
    """The time between any change of a role and one that takes workers away."""
    stable_down: float = 300.0
    """The time for which the demand must have been lower before workers are taken away."""
    latency_memory: float = 3600.0
    """The time in which a step down that broke the latency target is not repeated at that load."""
    prefill: RolePolicy = RolePolicy(latency=1.0)
    decode: RolePolicy = RolePolicy(latency=0.05, requests=32.0)

    def __post_init__(self) -> None:
        _require(0 < self.interval < math.inf, "interval", self.interval, "a number above 0")
        _require(0 <= self.tolerance < 1, "tolerance", self.tolerance, "from 0 to below 1")
        for name in ("step_up", "step_down"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("cooldown_up", "cooldown_down", "stable_down", "latency_memory"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, value, "0 or more seconds")
