"""The settings of a simulation, and their names on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kvxfer.errors import InvalidArgument
from kvxfer.settings import check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The settings of a simulation. None means the default, if there is one."""

    instances: Annotated[int, Meta(ge=2, le=100_000)] = 100
    """Instances of the fleet."""
    policies: tuple[str, ...] = ("fixed",)
    ttft_target: float = 1.0
    """Target of the TTFT, seconds."""
    itl_target: float = 0.05
    """Target of the ITL, seconds."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """The seed that draws the requests."""
    detail: Annotated[int, Meta(ge=1000)] = 400_000
    """The most requests to simulate one by one; if there are more, only windows are simulated."""
    hours: Annotated[float, Meta(le=24 * 31)] | None = None
    """Length of the generated day."""
    load: float | None = None
    """Mean load, as a part of what the instances can serve."""
    rate: float | None = None
    """Mean load in requests/s, instead of --load."""
    prompt_tokens: Annotated[float, Meta(ge=1)] | None = None
    """Mean prompt."""
    output_tokens: Annotated[float, Meta(ge=1)] | None = None
    """Mean answer."""
    trace: Path | None = None
    """A file of requests to use instead: a CSV like Azure's LLM inference traces, or JSON lines
    like Mooncake's."""
    heartbeat_seconds: float = 2.0
    """Seconds between heartbeats: a third of the lease."""
    rack_size: Annotated[int, Meta(ge=1)] | None = None
    """Instances per rack, for the distances of pairing."""
    gpus: float = 1.0
    """GPUs of an instance."""
    cost_per_hour: Annotated[float, Meta(ge=0)] = 0.0
    """The cost of a GPU per hour."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        for name, named in (
            ("ttft_target", "slo_ttft"),
            ("itl_target", "slo_itl"),
            *((same, same) for same in ("hours", "load", "rate", "heartbeat_seconds", "gpus")),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidArgument(f"{option(named)} is {value}; write a number above 0")
        if self.load is not None and self.rate is not None:
            raise InvalidArgument("--load and --rate are two names for one thing; write one")
        if self.trace is not None:
            for name in ("hours", "load", "rate", "prompt_tokens", "output_tokens"):
                if getattr(self, name) is not None:
                    raise InvalidArgument(
                        f"{option(name)} is {getattr(self, name)}, but --trace says what comes "
                        "in; leave one of them out"
                    )
        check_bounds(self)


def option(name: str) -> str:
    """Returns a member's name on the command line."""
    return f"--{name.replace('_', '-')}"
