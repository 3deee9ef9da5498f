"""What the control plane knows of a worker: records that registry, REST API and client share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, field

from kvxfer.addresses import BOOTSTRAP_FORM, ENGINE_FORM, HTTP_FORM, require_address
from kvxfer.kv_versions import UNTOLD, VERSIONS
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity
from kvxfer.prefix_hashes import MAX_HASHES_PER_INSTANCE, MAX_HASHES_PER_UPDATE
from kvxfer.record import HexInt, Record, Word

InstanceId: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$",
        description="Names the instance: letters, digits and . _ : -, at most 128 characters.",
        examples=["prefill-0"],
    ),
]
Epoch: TypeAlias = Annotated[
    int,
    Meta(
        ge=1,
        le=2**63 - 1,
        description="Names one registration of an instance; a later one has a greater epoch.",
        examples=[1795046400000001],
    ),
]
# Numbers that any language's 32-bit signed integer can hold.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# A 64-bit chain hash: it names a prefix of a prompt (kvxfer.prefix_hashes).
BlockHash: TypeAlias = Annotated[int, HexInt, Meta(examples=["9f1c2a7be0d44c5e"])]
# What feeds the autoscaler; None where it is not measured.
Measured: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)] | None
# What a client may ask for; an instance that is gone is not held any more.
LiveState: TypeAlias = Literal["joining", "ready", "draining"]
UnixTime: TypeAlias = Annotated[float, Meta(examples=[1795046460.0])]

ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, examples=["llama-3.2-3b"])]
_Fabric: TypeAlias = Annotated[str, Meta(min_length=1, max_length=32, examples=["tcp"])]
EngineAddress: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^kvx://\S+$",
        max_length=512,
        examples=["kvx://10.0.0.5:7400/9f1c2a7be0d44c5e8a3b6d7f01e2c3d4"],
    ),
]
HttpAddress: TypeAlias = Annotated[
    str, Meta(pattern=r"^(https?://\S+)?$", max_length=512, examples=["http://10.0.0.5:8000"])
]
_Label: TypeAlias = Annotated[str, Meta(max_length=256)]
_KvVersion: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Role(Word):
    """The side of a transfer that an instance takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def serves(self, side: Role) -> bool:
        return self is side or self is Role.BOTH


class InstanceState(Word):
    """Where an instance is in its life. It moves forward; only the undo of a drain leads back."""

    JOINING = "joining"  # registered, not yet able to take transfers
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, gets nothing new
    GONE = "gone"  # deregistered, or its lease expired

    def advanced_to(self, wanted: InstanceState) -> InstanceState:
        """The later of the two states; this one if the other is not known."""
        if not wanted.known:
            return self
        order = list(InstanceState)
        return max(self, wanted, key=order.index)


class Traffic(Record, frozen=True, kw_only=True):
    """What one worker has delivered to another over one fabric, over the last seconds."""

    to: InstanceId
    """The decode instance."""
    fabric: _Fabric
    bytes_per_second: Annotated[float, Meta(ge=0, le=1e15)]


class Load(Record, frozen=True, kw_only=True):
    """What a worker says of itself with each heartbeat."""

    running: Count = 0
    """Requests that are being computed."""
    waiting: Count = 0
    """Requests that are queued."""
    free_blocks: Count | None = None
    """KV blocks that are free now; None where the worker does not count them."""
    cached_blocks: Count | None = None
    """KV blocks that the prefix cache holds, in use or free; None where there is no such count."""
    queues: bool = False
    """Whether a request for which there are no free blocks waits there. Otherwise the worker
    refuses it, and is not chosen for it."""
    requests_per_second: Measured = None
    """Requests that arrive and are not refused, over the last minute or so. This one and those
    below feed the autoscaler; None where the worker does not measure them."""
    tokens_per_second: Measured = None
    """Tokens of these prompts at prefill, of output that decode emits."""
    ttft_p90: Measured = None
    """90th percentile of the seconds to the first token."""
    itl_p90: Measured = None
    """90th percentile of the seconds between two tokens."""
    sent: Annotated[tuple[Traffic, ...], Meta(max_length=256)] = ()
    """The KV cache that goes to each decode worker now, the most first."""
    models: Annotated[tuple[ModelName, ...], Meta(max_length=1024)] = ()
    """What requests may ask for beside the model: aliases, and adapters that are loaded."""


class Reserved(Record, frozen=True, kw_only=True):
    """What open transfers hold of an instance."""

    transfers: int = 0
    blocks: int = 0


class Prefilling(Record, frozen=True, kw_only=True):
    """What an instance has to compute for the open transfers that it is the prefill side of."""

    transfers: int = 0
    tokens: int = 0
    """Of their prompts, but for those that it was taken to have in its cache; 2,000 for a prompt of
    unknown length."""


class InstanceSpec(Record, frozen=True, kw_only=True):
    """What a worker registers."""

    instance_id: InstanceId
    role: Role
    model: ModelName
    """Only instances of one model make a pair."""
    engine_address: EngineAddress
    """Where its transfer engine listens, `kvx://HOST:PORT/ENGINE_ID`."""
    http_address: HttpAddress = ""
    """Where its inference API listens, `http://HOST:PORT`; an IPv6 address is in brackets. The
    router needs it; empty for an engine without an HTTP API, which is for clients that open
    transfers themselves."""
    layout: KvLayout
    num_blocks: Annotated[PositiveCount, Meta(examples=[4096])]
    """KV blocks of one layer in its pool."""
    fabrics: Annotated[tuple[_Fabric, ...], Meta(min_length=1, max_length=16)] = ("local", "tcp")
    """What its engine can transfer over, the best one first."""
    rank_addresses: Annotated[tuple[EngineAddress, ...], Meta(max_length=1024)] = ()
    """Where the engine of each rank listens, stage by stage and in a stage by `tp_rank`; empty
    where the one at `engine_address` is all that is registered."""
    bootstrap_address: Annotated[str, Meta(pattern=r"^(\S+:\d{1,5})?$", max_length=512)] = ""
    """Of a prefill instance of SGLang, where its bootstrap server listens, `HOST:PORT`: requests
    for a pair with it name that and a room, as SGLang's router does."""
    labels: Annotated[
        Mapping[Annotated[str, Meta(max_length=63)], _Label],
        Meta(max_length=64, examples=[{"zone": "eu-1a", "host": "node-5"}]),
    ] = field(default_factory=dict)
    """Where it runs: `zone`, `rack`, `host` and `numa` decide which pairs are near; any other is
    for people."""
    identity: ModelIdentity | None = None
    """What its KV cache is of; None where the worker does not tell."""
    kv_versions: tuple[_KvVersion, _KvVersion] = VERSIONS
    """The oldest and the newest version of the KV protocol that it speaks: those of its
    KvEndpoint."""
    aggregates: bool = False
    """Whether it serves requests without a ticket alone, from the prompt to the last token."""


class ToldSpec(InstanceSpec, frozen=True, kw_only=True):
    """A spec as it comes from another process, whose version of kvxfer may be an older one."""

    kv_versions: tuple[_KvVersion, _KvVersion] = UNTOLD
    """The oldest and the newest version of the KV protocol that it speaks; workers of version 7 do
    not tell."""


class RegisterInstance(ToldSpec, frozen=True, kw_only=True):
    """A worker that joins. Raises ValueError where the members do not go together."""

    state: Literal["joining", "ready"] = "joining"
    """`ready` for a worker that can take transfers at once."""
    incarnation: Annotated[str, Meta(max_length=128)] = ""
    """Random per process. A process that registers again while it still holds the id itself gets a
    new epoch instead of instance-exists."""
    takes_secret: bool = False
    """Whether the worker keeps the secret that comes with its lease, and shows it with each call as
    this instance. Calls as one that does not take it need none."""

    def __post_init__(self) -> None:
        if self.instance_id == "watch":
            raise ValueError(
                "instance_id is 'watch', which is the name of a route; choose another one"
            )
        if self.http_address:
            require_address("http_address", self.http_address, HTTP_FORM)
        require_address("engine_address", self.engine_address, ENGINE_FORM)
        for rank, address in enumerate(self.rank_addresses):
            require_address(f"rank_addresses[{rank}]", address, ENGINE_FORM)
        if self.bootstrap_address:
            require_address("bootstrap_address", self.bootstrap_address, BOOTSTRAP_FORM)
        if self.rank_addresses and len(self.rank_addresses) != self.layout.num_ranks:
            raise ValueError(
                f"rank_addresses has {len(self.rank_addresses)} addresses, the layout "
                f"{self.layout.num_ranks} ranks; give the address of each, or none"
            )
        if self.kv_versions[0] > self.kv_versions[1]:
            raise ValueError(
                f"kv_versions is {list(self.kv_versions)}; give the oldest version first"
            )

    @property
    def spec(self) -> InstanceSpec:
        """What stays registered."""
        return InstanceSpec(**_members(self))


class Instance(ToldSpec, frozen=True, kw_only=True):
    """A registered worker. Times are seconds since the Unix epoch."""

    epoch: Epoch
    state: InstanceState
    registered_at: UnixTime
    heartbeat_at: UnixTime
    load: Load = field(default_factory=Load)
    reserved: Reserved = field(default_factory=Reserved)
    prefilling: Prefilling = field(default_factory=Prefilling)
    started: int = 0
    """Transfers to it that were released since it last told its load: requests that it decodes and
    has not told of. Pairing takes them for running ones."""
    drain_deadline: float | None = None
    """The time until which it may finish its requests; None if it does not drain."""
    has_secret: bool = False
    """Whether calls as this instance need the secret of its lease."""

    @classmethod
    def of(cls, spec: InstanceSpec, **registration: Any) -> Instance:
        """The instance that registered with `spec`; the members of its registration take the place
        of those of the spec."""
        return cls(**{**_members(spec), **registration})

    @property
    def weights_version(self) -> int | None:
        """Of the weights that it serves; None where it does not tell."""
        return None if self.identity is None else self.identity.weights_version

    def serves(self, model: str | None) -> bool:
        """Whether requests for this model may come to it; None is any."""
        return model is None or model == self.model or model in self.load.models


class InstanceList(Record, frozen=True, kw_only=True):
    """The live instances, ordered by id."""

    instances: tuple[Instance, ...]
    stale_seconds: float | None = None
    """None where the list is current; else the registry cannot be reached, and this is what was
    known so many seconds ago."""


class Heartbeat(Record, frozen=True, kw_only=True):
    """A sign of life. What is left out stays as it was."""

    epoch: Epoch
    state: Annotated[LiveState | None, Meta(examples=["ready"])] = None
    """States only move forward: one behind the current state is ignored."""
    load: Load | None = None


class Lease(Record, frozen=True, kw_only=True):
    """The answer to a registration and to each heartbeat."""

    instance_id: InstanceId
    epoch: Epoch
    state: InstanceState
    """As the control plane holds it: `draining` tells a worker that it is being drained."""
    lease_seconds: Annotated[float, Meta(examples=[6.0])]
    """Without a heartbeat for this long the instance is gone."""
    heartbeat_interval: Annotated[float, Meta(examples=[2.0])]
    """Seconds between the heartbeats that the control plane would like."""
    role: Role
    """As the control plane holds it: another one than before tells a worker to change sides."""
    reserved: Reserved
    """What open transfers hold of the instance: requests that may still be on their way to it."""
    drain_seconds: float | None = None
    """How long a draining worker may still take; None if it does not drain."""
    at: UnixTime | None = None
    """The clock of the control plane when it answered. A worker whose clock differs refuses
    tickets."""


class Registered(Lease, frozen=True, kw_only=True):
    """The lease that a registration begins."""

    secret: str | None = None
    """Calls as this instance show it in the header `Kvxfer-Instance-Secret`. It is told this once;
    None for a worker that does not take it."""


class BlockUpdate(Record, frozen=True, kw_only=True):
    """What changed about the KV blocks that an instance has cached. It may be sent again."""

    added: Annotated[tuple[BlockHash, ...], Meta(max_length=MAX_HASHES_PER_UPDATE)] = ()
    removed: Annotated[tuple[BlockHash, ...], Meta(max_length=MAX_HASHES_PER_UPDATE)] = ()
    reset: bool = False
    """Whether all that was there before is gone."""


class PublishBlocks(BlockUpdate, frozen=True, kw_only=True):
    """A BlockUpdate under the lease of its instance."""

    epoch: Epoch


class PublishedBlocks(Record, frozen=True, kw_only=True):
    """The answer to a BlockUpdate."""

    held: Annotated[int, Meta(examples=[417])]
    """How many hashes of the instance the control plane has now."""
    capacity: Annotated[int, Meta(examples=[MAX_HASHES_PER_INSTANCE])]
    """How many it keeps. Of one that has more it forgets those before the last update."""


class DrainRequest(Record, frozen=True, kw_only=True):
    """How long an instance may take to finish what it has."""

    deadline_seconds: Annotated[float, Meta(ge=0, le=7 * 24 * 3600)] = 60.0
    """After that the worker leaves all the same."""


class RoleChange(Record, frozen=True, kw_only=True):
    """The side that an instance takes from now on."""

    role: Role


class ChangeCause(Word):
    """Why an instance changed."""

    REGISTERED = "registered"
    STATE_CHANGED = "state-changed"
    ROLE_CHANGED = "role-changed"
    DEREGISTERED = "deregistered"
    LEASE_EXPIRED = "lease-expired"


class Change(Record, frozen=True, kw_only=True):
    """One step of the fleet. Heartbeats that only report load are no change."""

    id: int
    cause: ChangeCause
    instance: Instance
    """The instance after the change."""


class Snapshot(Record, frozen=True, kw_only=True):
    """Every live instance at the moment of change `id`; it replaces whatever was known before."""

    id: int
    instances: tuple[Instance, ...]


def _members(spec: InstanceSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in InstanceSpec.__struct_fields__}
