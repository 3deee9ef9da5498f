"""Bodies about scaling."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from kvxfer.scaling import Bound, Rule

_PREFILL: JsonDict = {
    "role": "prefill",
    "current": 2,
    "wanted": 4,
    "direction": "up",
    "because": "rate: 3.86 workers for 60,000 tokens/s at 20,000 per worker, 78% of it used",
    "demands": [
        {
            "rule": "rate",
            "workers": 3.86,
            "because": "rate: 3.86 workers for 60,000 tokens/s at 20,000 per worker, 78% of it "
            "used",
        }
    ],
    "silent": ["latency: no worker reports its TTFT"],
    "clips": [],
}
_DECODE: JsonDict = {
    "role": "decode",
    "current": 4,
    "wanted": 4,
    "direction": "hold",
    "because": "requests: 2.50 workers for 80 requests running and 0 waiting at 32 per worker; "
    "stabilisation: 4 instead of 3, up to 4 were asked for in the last 300 s",
    "demands": [
        {
            "rule": "requests",
            "workers": 2.5,
            "because": "requests: 2.50 workers for 80 requests running and 0 waiting at 32 per "
            "worker",
        }
    ],
    "silent": ["rate: tokens_per_second of a worker is not in the policy"],
    "clips": [
        {
            "bound": "stabilisation",
            "before": 3,
            "after": 4,
            "because": "stabilisation: 4 instead of 3, up to 4 were asked for in the last 300 s",
        }
    ],
}


class Demand(BaseModel):
    """A rule that spoke."""

    model_config = ConfigDict(from_attributes=True)

    rule: Rule
    workers: float = Field(description="How many workers the load takes by this rule.")
    because: str


class Clip(BaseModel):
    """A bound that changed the count."""

    model_config = ConfigDict(from_attributes=True)

    bound: Bound
    before: int
    after: int
    because: str


class RoleDecision(BaseModel):
    """The decision for one role."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_PREFILL]})

    role: Literal["prefill", "decode"]
    current: int = Field(description="Workers that there are or that were asked for.")
    wanted: int
    direction: Literal["up", "down", "hold"]
    because: str = Field(description="The decision in one line.")
    demands: list[Demand] = Field(description="The greatest decides; with none the count stays.")
    silent: list[str] = Field(description="Why each other rule could not speak.")
    clips: list[Clip] = Field(description="In the order in which they applied.")


class ScalePlan(BaseModel):
    """What this replica would do now. Nothing is applied by asking."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "examples": [
                {
                    "at": 1795046460.0,
                    "policy": "scaling.yaml",
                    "model": None,
                    "backend": "kubernetes",
                    "leads": True,
                    "observed_seconds": 900.0,
                    "prefill": _PREFILL,
                    "decode": _DECODE,
                }
            ]
        },
    )

    at: float = Field(description="Seconds since the Unix epoch.")
    policy: str = Field(description="The scaling file, or `default`.")
    model: str | None = Field(description="Only workers of this model count; null counts all.")
    backend: Literal["none", "processes", "kubernetes"] = Field(
        description="What applies decisions; with `none` nothing does."
    )
    leads: bool = Field(description="Whether this replica applies decisions.")
    observed_seconds: float = Field(description="How long this replica has watched the load.")
    prefill: RoleDecision
    decode: RoleDecision
