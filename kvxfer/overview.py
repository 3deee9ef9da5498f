"""One look at all of the fleet: records that control plane, page and `kvxfer top` share.

Its size does not grow with the fleet: what is many is counted by place, or comes in pages.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from kvxfer.instances import InstanceState, Role, UnixTime
from kvxfer.record import Record
from kvxfer.weight_updates import UpdateId, UpdateState

_InstanceId: TypeAlias = Annotated[str, Meta(examples=["prefill-0"])]
_DecodeId: TypeAlias = Annotated[str, Meta(examples=["decode-0"])]
_ModelName: TypeAlias = Annotated[str, Meta(examples=["llama-3.2-3b"])]
_Zone: TypeAlias = Annotated[str, Meta(examples=["eu-1a"])]
_Rack: TypeAlias = Annotated[str, Meta(examples=["r3"])]
_Host: TypeAlias = Annotated[str, Meta(examples=["node-5"])]
_Fabric: TypeAlias = Annotated[str, Meta(examples=["verbs"])]
_BytesPerSecond: TypeAlias = Annotated[float, Meta(examples=[9400000000.0])]


class Level(StrEnum):
    """What one place of the map is, the widest first."""

    ZONE = "zone"
    RACK = "rack"
    HOST = "host"
    INSTANCE = "instance"


class OverviewQuery(Struct, frozen=True, kw_only=True):
    """Which instances to look at, and which of them to list. None takes all."""

    instance_id: str | None = None
    model: str | None = None
    role: Role | None = None
    state: InstanceState | None = None
    zone: str | None = None
    """As labels have it; empty for instances without the label."""
    rack: str | None = None
    host: str | None = None
    search: str | None = None
    """Part of an instance's id, in whatever case."""
    offset: int = 0
    limit: int = 50


class RoleSummary(Record, frozen=True, kw_only=True):
    """All instances of one role together. Rates are those of the instances that report them."""

    role: Role
    joining: int = 0
    ready: int = 0
    draining: int = 0
    running: int = 0
    """Requests."""
    waiting: int = 0
    blocks: int = 0
    """KV blocks of the instances that count them."""
    used_blocks: int = 0
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    ttft_p90: float | None = None
    """The highest that an instance reports, in seconds."""
    itl_p90: float | None = None


class Place(Record, frozen=True, kw_only=True):
    """One place of the map: a zone, rack, host or instance. What is wider than it has a name."""

    name: _InstanceId
    zone: _Zone
    rack: _Rack | None
    """None where the place is not within one rack."""
    host: _Host | None
    prefill: int = 0
    """Instances, by role and by state."""
    decode: int = 0
    both: int = 0
    joining: int = 0
    ready: int = 0
    draining: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    used_blocks: int = 0
    bytes_per_second: float = 0.0
    """Sent and received."""


class InstanceSummary(Record, frozen=True, kw_only=True):
    """One row of the list of instances."""

    instance_id: _InstanceId
    role: Role
    state: InstanceState
    model: _ModelName
    zone: _Zone
    rack: _Rack
    host: _Host
    running: int
    waiting: int
    transfers: int
    """Open ones, which hold a reservation."""
    blocks: int
    used_blocks: int | None
    weights_version: int | None
    """Of the weights that it serves; None where it does not tell."""
    sent_bytes_per_second: _BytesPerSecond
    received_bytes_per_second: float
    heartbeat_seconds: float
    """Since the last heartbeat."""
    drain_seconds: Annotated[float | None, Meta(examples=[None])]
    """Until its deadline; None if it is not drained."""


class TransferSummary(Record, frozen=True, kw_only=True):
    """An open transfer."""

    transfer_id: Annotated[str, Meta(examples=["3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a"])]
    request_id: Annotated[str, Meta(examples=["cmpl-7"])]
    prefill: _InstanceId
    decode: _DecodeId
    prompt_tokens: int | None
    blocks: int
    """KV blocks reserved at decode."""
    age_seconds: float


class UpdateSummary(Record, frozen=True, kw_only=True):
    """An update of a model's weights."""

    update_id: UpdateId
    model: _ModelName
    version: int
    state: UpdateState
    instances: int
    """Those that take part."""
    staged: int
    """How many of them have the weights; those that serve them, too."""
    committed: int
    """How many of them serve the weights."""
    failed: int
    """How many of them failed or are lost."""
    error: Annotated[str, Meta(examples=[""])]
    """Empty, or why it ended as it did."""
    age_seconds: float
    """Since it was announced."""
    pause_seconds: float | None
    """The longest that an instance had."""


class FabricTraffic(Record, frozen=True, kw_only=True):
    """What is delivered over one fabric."""

    fabric: _Fabric
    bytes_per_second: _BytesPerSecond


class PairTraffic(Record, frozen=True, kw_only=True):
    """What one prefill worker delivers to one decode worker."""

    prefill: _InstanceId
    decode: _DecodeId
    fabric: _Fabric
    bytes_per_second: _BytesPerSecond


class ScalingStep(Record, frozen=True, kw_only=True):
    """A decision of the autoscaler for one role."""

    age_seconds: float
    role: Role
    current: int
    wanted: int
    direction: Literal["up", "down", "hold"]
    because: Annotated[
        str,
        Meta(
            examples=["requests: 1.88 workers for 9 requests running and 6 waiting at 8 per worker"]
        ),
    ]


class ScalingSummary(Record, frozen=True, kw_only=True):
    """What the autoscaler of this replica decides."""

    policy: Annotated[str, Meta(examples=["scaling.yaml"])]
    backend: Annotated[str, Meta(examples=["kubernetes"])]
    leads: bool
    """Whether this replica applies its decisions."""
    now: tuple[ScalingStep, ...]
    """The last decision for each role."""
    changes: tuple[ScalingStep, ...]
    """Decisions for another count than there was, the newest first."""


class Overview(Record, frozen=True, kw_only=True):
    """The fleet at one moment. It stays small however large the fleet is."""

    at: UnixTime
    """Seconds since the Unix epoch."""
    stale_seconds: Annotated[float | None, Meta(examples=[None])]
    """While the registry is away this is what was known so many seconds ago; None else."""
    total: int
    """Instances, whatever is asked for."""
    matching: int
    """Instances that are asked for: roles, places and the list are of them, and transfers and
    traffic have one of them on a side."""
    models: tuple[_ModelName, ...]
    roles: tuple[RoleSummary, ...]
    level: Level
    """What a place is: the narrowest with at most 240 of them."""
    places: tuple[Place, ...]
    places_omitted: int
    offset: int
    instances: tuple[InstanceSummary, ...]
    """A page of them, ordered by id."""
    transfers_opened: int
    """Since the registry began, whatever is asked for."""
    transfers_open: int
    transfers: tuple[TransferSummary, ...]
    """The newest 50 of them."""
    fabrics: tuple[FabricTraffic, ...]
    pairs: tuple[PairTraffic, ...]
    """The 50 with the most traffic."""
    pairs_omitted: int
    updates: tuple[UpdateSummary, ...]
    """Weight updates under way and that ended, the newest 10, whatever is asked for."""
    scaling: ScalingSummary | None
    """None where no autoscaler runs."""
