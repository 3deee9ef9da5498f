"""Records of an overview of the fleet, shared by control plane, page and `kvxfer top`.

The size of an overview does not grow with the fleet: it counts by place and lists by page.
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
    """The kinds of places on the map, the widest first."""

    ZONE = "zone"
    RACK = "rack"
    HOST = "host"
    INSTANCE = "instance"


class OverviewQuery(Struct, frozen=True, kw_only=True):
    """The instances to look at, and the page of them to list. None stands for all."""

    instance_id: str | None = None
    model: str | None = None
    role: Role | None = None
    state: InstanceState | None = None
    zone: str | None = None
    """Value of the label; empty for instances without the label."""
    rack: str | None = None
    host: str | None = None
    search: str | None = None
    """Part of an instance's id, in upper or lower case."""
    offset: int = 0
    limit: int = 50


class RoleSummary(Record, frozen=True, kw_only=True):
    """All instances of one role together. Rates cover the instances that report them."""

    role: Role
    joining: int = 0
    ready: int = 0
    draining: int = 0
    running: int = 0
    """Requests that are being computed."""
    waiting: int = 0
    blocks: int = 0
    """KV blocks of the instances that count them."""
    used_blocks: int = 0
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    ttft_p90: float | None = None
    """Highest 90th percentile that an instance reports, in seconds."""
    itl_p90: float | None = None


class Place(Record, frozen=True, kw_only=True):
    """One place on the map: a zone, rack, host or instance."""

    name: _InstanceId
    zone: _Zone
    rack: _Rack | None
    """Rack of the place; None for a zone."""
    host: _Host | None
    """Host of the place; None for a zone or rack."""
    prefill: int = 0
    """Instances of this role. Those below are counts by role, then by state."""
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
    """Bytes per second that its instances send and receive."""


class InstanceSummary(Record, frozen=True, kw_only=True):
    """A row of the list of instances."""

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
    """Open transfers, which hold a reservation."""
    blocks: int
    used_blocks: int | None
    weights_version: int | None
    """Version of the weights that it serves; None if it does not report it."""
    sent_bytes_per_second: _BytesPerSecond
    received_bytes_per_second: float
    heartbeat_seconds: float
    """Seconds since the last heartbeat."""
    drain_seconds: Annotated[float | None, Meta(examples=[None])]
    """Seconds until its drain deadline; None if it does not drain."""


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
    """Instances that take part."""
    staged: int
    """Instances that have the weights, including those that serve them."""
    committed: int
    """Instances that serve the weights."""
    failed: int
    """Instances that failed or are lost."""
    error: Annotated[str, Meta(examples=[""])]
    """Error of the update; empty without one."""
    age_seconds: float
    """Seconds since it was announced."""
    pause_seconds: float | None
    """Longest pause of an instance, in seconds; None if no instance reports one."""


class FabricTraffic(Record, frozen=True, kw_only=True):
    """The traffic over one fabric."""

    fabric: _Fabric
    bytes_per_second: _BytesPerSecond


class PairTraffic(Record, frozen=True, kw_only=True):
    """The traffic from one prefill worker to one decode worker over one fabric."""

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
    """The decisions of this replica's autoscaler."""

    policy: Annotated[str, Meta(examples=["scaling.yaml"])]
    backend: Annotated[str, Meta(examples=["kubernetes"])]
    leads: bool
    """Whether this replica applies its decisions."""
    now: tuple[ScalingStep, ...]
    """Last decision for each role."""
    changes: tuple[ScalingStep, ...]
    """Decisions that changed a count, the newest first."""


class Overview(Record, frozen=True, kw_only=True):
    """The fleet at one moment. It stays small, however large the fleet is."""

    at: UnixTime
    """Seconds since the Unix epoch."""
    stale_seconds: Annotated[float | None, Meta(examples=[None])]
    """Age of the data in seconds while the registry is unavailable; None if the data is current."""
    total: int
    """Instances of the whole fleet."""
    matching: int
    """Instances that match the query. Roles, places and the list cover these; transfers and traffic
    have one of these on a side."""
    models: tuple[_ModelName, ...]
    roles: tuple[RoleSummary, ...]
    level: Level
    """Kind of the places: the narrowest kind with at most 240 places, or `zone`."""
    places: tuple[Place, ...]
    places_omitted: int
    offset: int
    instances: tuple[InstanceSummary, ...]
    """A page of the matching instances, ordered by id."""
    transfers_opened: int
    """Transfers of the whole fleet since the registry began."""
    transfers_open: int
    transfers: tuple[TransferSummary, ...]
    """The newest 50 open transfers."""
    fabrics: tuple[FabricTraffic, ...]
    pairs: tuple[PairTraffic, ...]
    """The 50 pairs with the most traffic."""
    pairs_omitted: int
    updates: tuple[UpdateSummary, ...]
    """The newest 10 weight updates of the whole fleet, under way or ended."""
    scaling: ScalingSummary | None
    """Decisions of the autoscaler; None if none runs."""
