"""What the control plane knows of a worker: records that registry, REST API and client share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity


class Role(StrEnum):
    """The side of a transfer that an instance takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def serves(self, side: Role) -> bool:
        return self is side or self is Role.BOTH


class InstanceState(StrEnum):
    """Where an instance is in its life; it only ever moves forward."""

    JOINING = "joining"  # registered, not yet able to take transfers
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, gets nothing new
    GONE = "gone"  # deregistered, or its lease expired

    def advanced_to(self, wanted: InstanceState) -> InstanceState:
        """The later of the two states."""
        order = list(InstanceState)
        return max(self, wanted, key=order.index)


class Traffic(Struct, frozen=True, kw_only=True):
    """What one worker has delivered to another over one fabric, over the last seconds."""

    to: str
    """The decode instance."""
    fabric: str
    bytes_per_second: float


class Load(Struct, frozen=True, kw_only=True):
    """What a worker says of itself with each heartbeat."""

    running: int = 0
    """Requests that are being computed."""
    waiting: int = 0
    """Requests that are queued."""
    free_blocks: int | None = None
    """KV blocks that are free now; None where the worker does not count them."""
    cached_blocks: int | None = None
    """KV blocks that the prefix cache holds, in use or free; None where there is no such count."""
    queues: bool = False
    """Whether a request for which there are no free blocks waits there. Otherwise the worker
    refuses it, and is not chosen for it."""
    requests_per_second: float | None = None
    """Requests that arrive, over the last minute or so. This one and those below feed the
    autoscaler; None where the worker does not measure them."""
    tokens_per_second: float | None = None
    """Tokens of prompts that arrive at prefill, of output that decode emits."""
    ttft_p90: float | None = None
    """90th percentile of the seconds to the first token."""
    itl_p90: float | None = None
    """90th percentile of the seconds between two tokens."""
    sent: tuple[Traffic, ...] = ()
    """The KV cache that goes to each decode worker now, the most first."""
    models: tuple[str, ...] = ()
    """What requests may ask for beside the model: aliases, and adapters that are loaded."""


class Reserved(Struct, frozen=True, kw_only=True):
    """What open transfers hold of an instance."""

    transfers: int = 0
    blocks: int = 0


class InstanceSpec(Struct, frozen=True, kw_only=True):
    """What a worker registers."""

    instance_id: str
    role: Role
    model: str
    engine_address: str
    """Where its transfer engine listens, `kvx://HOST:PORT/ENGINE_ID`."""
    http_address: str
    """Where its inference API listens, `http://HOST:PORT`."""
    layout: KvLayout
    num_blocks: int
    fabrics: tuple[str, ...] = ("local", "tcp")
    rank_addresses: tuple[str, ...] = ()
    """Where the engine of each rank listens, in the order of KvLayout.rank; empty where the one at
    `engine_address` is all that is registered."""
    bootstrap_address: str = ""
    """Of a prefill instance of SGLang, where its bootstrap server listens, HOST:PORT: requests for
    a pair with it name that and a room, as SGLang's router does."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Where it runs: pairs that are near by zone, rack, host and numa are preferred."""
    identity: ModelIdentity | None = None
    """What its KV cache is of; None where the worker does not tell."""
    kv_versions: tuple[int, int] = (7, 7)
    """The oldest and the newest version of the KV protocol that it speaks; workers of version 7 do
    not tell."""


class Instance(InstanceSpec, frozen=True, kw_only=True):
    """A registered worker. Times are seconds since the Unix epoch."""

    epoch: int
    """Names this registration; a later one of the same id has a greater epoch."""
    state: InstanceState
    registered_at: float
    heartbeat_at: float
    load: Load = field(default_factory=Load)
    reserved: Reserved = field(default_factory=Reserved)
    started: int = 0
    """Transfers to it that were released since its last load: requests that it decodes and has not
    told of."""
    drain_deadline: float | None = None
    """Until when it may finish what it has; None where nobody has asked it to drain."""

    def serves(self, model: str | None) -> bool:
        """Whether requests for this model may come to it; None is any."""
        return model is None or model == self.model or model in self.load.models


class Lease(Struct, frozen=True, kw_only=True):
    """The answer to a registration and to each heartbeat."""

    instance_id: str
    epoch: int
    state: InstanceState
    """As the control plane holds it: `draining` tells a worker that it is being drained."""
    lease_seconds: float
    """Without a heartbeat for this long the instance is gone."""
    heartbeat_interval: float
    """Seconds between the heartbeats that the control plane would like."""
    role: Role
    """As the control plane holds it: another one than before tells a worker to change sides."""
    reserved: Reserved
    """What open transfers hold of the instance: requests that may still be on their way to it."""
    drain_seconds: float | None = None
    """How long a worker that is drained may still take; None where nobody has asked it to."""


class BlockUpdate(Struct, frozen=True, kw_only=True):
    """What changed about the KV blocks that an instance has cached, as 64-bit hashes."""

    added: tuple[int, ...] = ()
    """The newest last. Hashes that were there already count as new."""
    removed: tuple[int, ...] = ()
    reset: bool = False
    """Whether `added` is all there is."""


class PublishedBlocks(Struct, frozen=True, kw_only=True):
    """The answer to a BlockUpdate."""

    held: int
    """How many hashes of the instance the control plane has now."""
    capacity: int
    """How many it keeps: the newest."""


class ChangeCause(StrEnum):
    """Why an instance changed."""

    REGISTERED = "registered"
    STATE_CHANGED = "state-changed"
    ROLE_CHANGED = "role-changed"
    DEREGISTERED = "deregistered"
    LEASE_EXPIRED = "lease-expired"


class Change(Struct, frozen=True, kw_only=True):
    """One step of the fleet. Heartbeats that only report load are no change."""

    id: int
    cause: ChangeCause
    instance: Instance
    """The instance after the change."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """Every live instance at the moment of change `id`; it replaces whatever was known before."""

    id: int
    instances: tuple[Instance, ...]
