"""Bodies about the fleet as a whole."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from kvxfer.instances import InstanceState, Role
from kvxfer.overview import Level

_PREFILL: JsonDict = {
    "role": "prefill",
    "joining": 0,
    "ready": 1,
    "draining": 0,
    "running": 3,
    "waiting": 1,
    "blocks": 4096,
    "used_blocks": 996,
    "requests_per_second": 12.5,
    "tokens_per_second": 21000.0,
    "ttft_p90": 0.31,
    "itl_p90": None,
}
_PLACE: JsonDict = {
    "name": "prefill-0",
    "zone": "eu-1a",
    "rack": "r3",
    "host": "node-5",
    "prefill": 1,
    "decode": 0,
    "both": 0,
    "joining": 0,
    "ready": 1,
    "draining": 0,
    "running": 3,
    "waiting": 1,
    "blocks": 4096,
    "used_blocks": 996,
    "bytes_per_second": 9400000000.0,
}
_ROW: JsonDict = {
    "instance_id": "prefill-0",
    "role": "prefill",
    "state": "ready",
    "model": "llama-3.2-3b",
    "zone": "eu-1a",
    "rack": "r3",
    "host": "node-5",
    "running": 3,
    "waiting": 1,
    "transfers": 2,
    "blocks": 4096,
    "used_blocks": 996,
    "sent_bytes_per_second": 9400000000.0,
    "received_bytes_per_second": 0.0,
    "heartbeat_seconds": 0.8,
    "drain_seconds": None,
}
_TRANSFER: JsonDict = {
    "transfer_id": "3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a",
    "request_id": "cmpl-7",
    "prefill": "prefill-0",
    "decode": "decode-0",
    "prompt_tokens": 1900,
    "blocks": 119,
    "age_seconds": 0.2,
}
_STEP: JsonDict = {
    "age_seconds": 4.0,
    "role": "prefill",
    "current": 1,
    "wanted": 2,
    "direction": "up",
    "because": "requests: 1.88 workers for 9 requests running and 6 waiting at 8 per worker",
}


class RoleSummary(BaseModel):
    """All instances of one role together. Rates are those of the instances that report them."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_PREFILL]})

    role: Role
    joining: int = 0
    ready: int = 0
    draining: int = 0
    running: int = Field(0, description="Requests.")
    waiting: int = 0
    blocks: int = Field(0, description="KV blocks of the instances that count them.")
    used_blocks: int = 0
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    ttft_p90: float | None = Field(
        None, description="The highest that an instance reports, in seconds."
    )
    itl_p90: float | None = None


class Place(BaseModel):
    """One place of the map: a zone, rack, host or instance. What is wider than it has a name."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_PLACE]})

    name: str
    zone: str
    rack: str | None = Field(description="Null where the place is not within one rack.")
    host: str | None
    prefill: int = Field(0, description="Instances, by role and by state.")
    decode: int = 0
    both: int = 0
    joining: int = 0
    ready: int = 0
    draining: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    used_blocks: int = 0
    bytes_per_second: float = Field(0.0, description="Sent and received.")


class InstanceSummary(BaseModel):
    """One row of the list of instances."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_ROW]})

    instance_id: str
    role: Role
    state: InstanceState
    model: str
    zone: str
    rack: str
    host: str
    running: int
    waiting: int
    transfers: int = Field(description="Open ones, which hold a reservation.")
    blocks: int
    used_blocks: int | None
    sent_bytes_per_second: float
    received_bytes_per_second: float
    heartbeat_seconds: float = Field(description="Since the last heartbeat.")
    drain_seconds: float | None = Field(
        description="Until its deadline; null where nobody drains it."
    )


class TransferSummary(BaseModel):
    """An open transfer."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_TRANSFER]})

    transfer_id: str
    request_id: str
    prefill: str
    decode: str
    prompt_tokens: int | None
    blocks: int = Field(description="KV blocks reserved at decode.")
    age_seconds: float


class FabricTraffic(BaseModel):
    """What is delivered over one fabric."""

    model_config = ConfigDict(from_attributes=True)

    fabric: str
    bytes_per_second: float


class PairTraffic(BaseModel):
    """What one prefill worker delivers to one decode worker."""

    model_config = ConfigDict(from_attributes=True)

    prefill: str
    decode: str
    fabric: str
    bytes_per_second: float


class ScalingStep(BaseModel):
    """A decision of the autoscaler for one role."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_STEP]})

    age_seconds: float
    role: Role
    current: int
    wanted: int
    direction: Literal["up", "down", "hold"]
    because: str


class ScalingSummary(BaseModel):
    """What the autoscaler of this replica decides."""

    model_config = ConfigDict(from_attributes=True)

    policy: str
    backend: str
    leads: bool = Field(description="Whether this replica applies its decisions.")
    now: list[ScalingStep] = Field(description="The last decision for each role.")
    changes: list[ScalingStep] = Field(
        description="Decisions for another count than there was, the newest first."
    )


class Overview(BaseModel):
    """The fleet at one moment. It stays small however large the fleet is."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "examples": [
                {
                    "at": 1795046460.0,
                    "stale_seconds": None,
                    "total": 2,
                    "matching": 1,
                    "models": ["llama-3.2-3b"],
                    "roles": [_PREFILL],
                    "level": "instance",
                    "places": [_PLACE],
                    "places_omitted": 0,
                    "offset": 0,
                    "instances": [_ROW],
                    "transfers_opened": 1204,
                    "transfers_open": 1,
                    "transfers": [_TRANSFER],
                    "fabrics": [{"fabric": "verbs", "bytes_per_second": 9400000000.0}],
                    "pairs": [
                        {
                            "prefill": "prefill-0",
                            "decode": "decode-0",
                            "fabric": "verbs",
                            "bytes_per_second": 9400000000.0,
                        }
                    ],
                    "pairs_omitted": 0,
                    "scaling": {
                        "policy": "scaling.yaml",
                        "backend": "kubernetes",
                        "leads": True,
                        "now": [_STEP],
                        "changes": [_STEP],
                    },
                }
            ]
        },
    )

    at: float = Field(description="Seconds since the Unix epoch.")
    stale_seconds: float | None = Field(
        description="While the registry is away this was known so many seconds ago; null else."
    )
    total: int = Field(description="Instances, whatever is asked for.")
    matching: int = Field(
        description=(
            "Instances that are asked for: roles, places and the list are of them, and transfers "
            "and traffic have one of them on a side."
        )
    )
    models: list[str]
    roles: list[RoleSummary]
    level: Level = Field(description="What a place is: the narrowest with at most 240 of them.")
    places: list[Place]
    places_omitted: int
    offset: int
    instances: list[InstanceSummary] = Field(description="A page of them, ordered by id.")
    transfers_opened: int = Field(description="Since the registry began, whatever is asked for.")
    transfers_open: int
    transfers: list[TransferSummary] = Field(description="The newest 50 of them.")
    fabrics: list[FabricTraffic]
    pairs: list[PairTraffic] = Field(description="The 50 with the most traffic.")
    pairs_omitted: int
    scaling: ScalingSummary | None = Field(description="Null where no autoscaler runs.")
