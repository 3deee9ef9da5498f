"""Records of workers, shared by registry, REST API and client."""

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
        description="The instance's id: letters, digits and . _ : -, at most 128 characters.",
        examples=["prefill-0"],
    ),
]
Epoch: TypeAlias = Annotated[
    int,
    Meta(
        ge=1,
        le=2**63 - 1,
        description="The number of an instance's registration; a later one has a greater epoch.",
        examples=[1795046400000001],
    ),
]
# Numbers that any language's 32-bit signed integer can hold.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# A 64-bit chain hash: it names a prefix of a prompt (kvxfer.prefix_hashes).
BlockHash: TypeAlias = Annotated[int, HexInt, Meta(examples=["9f1c2a7be0d44c5e"])]
# A measurement for the autoscaler; None if it is not measured.
Measured: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)] | None
# The states that a client may ask for. The registry forgets an instance that is gone.
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
    """The stage of an instance's life. Stages only move forward, except when a drain is undone."""

    JOINING = "joining"  # registered, not yet able to take transfers
    READY = "ready"
    DRAINING = "draining"  # finishes its work and gets no new work
    GONE = "gone"  # deregistered, or its lease expired

    def advanced_to(self, wanted: InstanceState) -> InstanceState:
        """Returns the later of the two states, or this one if the other is unknown."""
        if not wanted.known:
            return self
        order = list(InstanceState)
        return max(self, wanted, key=order.index)


class Traffic(Record, frozen=True, kw_only=True):
    """The recent traffic from one worker to another over one fabric."""

    to: InstanceId
    """The decode instance."""
    fabric: _Fabric
    bytes_per_second: Annotated[float, Meta(ge=0, le=1e15)]


class Load(Record, frozen=True, kw_only=True):
    """The load that a worker reports with each heartbeat."""

    running: Count = 0
    """Requests that are being computed."""
    waiting: Count = 0
    """Requests that are queued."""
    free_blocks: Count | None = None
    """Free KV blocks; None if the worker does not count them."""
    cached_blocks: Count | None = None
    """KV blocks in the prefix cache, in use or free; None if the worker does not count them."""
    queues: bool = False
    """Whether a request that lacks free blocks waits at the worker. Otherwise the worker refuses
    it, and pairing does not choose the worker for it."""
    requests_per_second: Measured = None
    """Requests per second that arrive and are not refused, over about the last minute. The
    autoscaler uses this rate and the three values below; None if the worker does not measure
    them."""
    tokens_per_second: Measured = None
    """Tokens per second: of the prompts at prefill, of the output at decode."""
    ttft_p90: Measured = None
    """90th percentile of the time to the first token, in seconds."""
    itl_p90: Measured = None
    """90th percentile of the time between two tokens, in seconds."""
    sent: Annotated[tuple[Traffic, ...], Meta(max_length=256)] = ()
    """Current KV cache traffic to each decode worker, the highest rate first."""
    models: Annotated[tuple[ModelName, ...], Meta(max_length=1024)] = ()
    """Names that requests may use besides `model`: aliases and loaded adapters."""


class Reserved(Record, frozen=True, kw_only=True):
    """The transfers that are open on an instance and the KV blocks that they reserve there."""

    transfers: int = 0
    blocks: int = 0


class Prefilling(Record, frozen=True, kw_only=True):
    """The open transfers that an instance prefills, and the prompt tokens that it must compute."""

    transfers: int = 0
    tokens: int = 0
    """Tokens of their prompts, without those assumed to be in its cache; 2,000 for a prompt of
    unknown length."""


class InstanceSpec(Record, frozen=True, kw_only=True):
    """The description of a worker in its registration."""

    instance_id: InstanceId
    role: Role
    model: ModelName
    """Only instances of one model make a pair."""
    engine_address: EngineAddress
    """Address of its transfer engine, `kvx://HOST:PORT/ENGINE_ID`."""
    http_address: HttpAddress = ""
    """Address of its inference API, `http://HOST:PORT`; an IPv6 address is in brackets. The router
    needs it. Empty for an engine without an HTTP API, whose clients open transfers themselves."""
    layout: KvLayout
    num_blocks: Annotated[PositiveCount, Meta(examples=[4096])]
    """KV blocks of one layer in its pool."""
    fabrics: Annotated[tuple[_Fabric, ...], Meta(min_length=1, max_length=16)] = ("local", "tcp")
    """Fabrics that its engine can use, the best one first."""
    rank_addresses: Annotated[tuple[EngineAddress, ...], Meta(max_length=1024)] = ()
    """Engine address of each rank, by pipeline stage and within a stage by `tp_rank`; empty if only
    the engine at `engine_address` is registered."""
    bootstrap_address: Annotated[str, Meta(pattern=r"^(\S+:\d{1,5})?$", max_length=512)] = ""
    """Address of the bootstrap server of an SGLang prefill instance, `HOST:PORT`. Requests for a
    pair with this instance name the address and a room, as with SGLang's router."""
    labels: Annotated[
        Mapping[Annotated[str, Meta(max_length=63)], _Label],
        Meta(max_length=64, examples=[{"zone": "eu-1a", "host": "node-5"}]),
    ] = field(default_factory=dict)
    """Labels of its place. `zone`, `rack`, `host` and `numa` decide which pairs are near; other
    labels are for people."""
    identity: ModelIdentity | None = None
    """The model behind its KV cache; None if the worker does not report it."""
    kv_versions: tuple[_KvVersion, _KvVersion] = VERSIONS
    """The oldest and the newest version of the KV protocol that its KvEndpoint speaks."""
    aggregates: bool = False
    """Whether it can serve a request alone, from the prompt to the last token, without a ticket."""


class ToldSpec(InstanceSpec, frozen=True, kw_only=True):
    """A spec from another process, which may run an older version of kvxfer."""

    kv_versions: tuple[_KvVersion, _KvVersion] = UNTOLD
    """The oldest and the newest version of the KV protocol that it speaks; workers of version 7 do
    not report them."""


class RegisterInstance(ToldSpec, frozen=True, kw_only=True):
    """The request of a worker to join. Raises ValueError if members contradict each other."""

    state: Literal["joining", "ready"] = "joining"
    """`ready` for a worker that can take transfers at once."""
    incarnation: Annotated[str, Meta(max_length=128)] = ""
    """Random text that names the process. A process that registers again while it holds the id
    itself gets a new epoch instead of instance-exists."""
    takes_secret: bool = False
    """Whether the worker keeps the secret that comes with its lease and shows it with each call as
    this instance. If not, such calls need no secret."""

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
        """The part of the request that stays registered."""
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
    """Transfers to it that were released since its last load report: requests that it decodes but
    has not reported. Pairing counts them as running."""
    drain_deadline: float | None = None
    """Deadline for finishing its requests; None if it does not drain."""
    has_secret: bool = False
    """Whether calls as this instance need the secret of its lease."""

    @classmethod
    def of(cls, spec: InstanceSpec, **registration: Any) -> Instance:
        """Returns the instance that registered with `spec`; `registration` overrides members of the
        spec."""
        return cls(**{**_members(spec), **registration})

    @property
    def weights_version(self) -> int | None:
        """The version of the weights that it serves; None if it does not report it."""
        return None if self.identity is None else self.identity.weights_version

    def serves(self, model: str | None) -> bool:
        """Whether it serves requests for this model; None stands for any model."""
        return model is None or model == self.model or model in self.load.models


class InstanceList(Record, frozen=True, kw_only=True):
    """The live instances, ordered by id."""

    instances: tuple[Instance, ...]
    stale_seconds: float | None = None
    """Age of the list in seconds if the registry cannot be reached; None if the list is current."""


class Heartbeat(Record, frozen=True, kw_only=True):
    """A sign of life. Members that are left out stay as they were."""

    epoch: Epoch
    state: Annotated[LiveState | None, Meta(examples=["ready"])] = None
    """The worker's state. States only move forward: one behind the current state is ignored."""
    load: Load | None = None


class Lease(Record, frozen=True, kw_only=True):
    """The answer to a registration and to each heartbeat."""

    instance_id: InstanceId
    epoch: Epoch
    state: InstanceState
    """State in the registry; `draining` tells the worker that it is being drained."""
    lease_seconds: Annotated[float, Meta(examples=[6.0])]
    """Seconds without a heartbeat after which the instance is gone."""
    heartbeat_interval: Annotated[float, Meta(examples=[2.0])]
    """Seconds between heartbeats that the control plane asks for."""
    role: Role
    """Role in the registry; a new role tells the worker to change sides."""
    reserved: Reserved
    """Reservations of open transfers, whose requests may still be on their way to the instance."""
    drain_seconds: float | None = None
    """Seconds that a draining worker may still take; None if it does not drain."""
    at: UnixTime | None = None
    """Time at the control plane when it answered, in seconds since the Unix epoch. A worker whose
    clock differs refuses tickets."""


class Registered(Lease, frozen=True, kw_only=True):
    """The lease that a registration begins."""

    secret: str | None = None
    """Secret that calls as this instance show in the header `Kvxfer-Instance-Secret`. Only this
    answer has it; None for a worker that does not take it."""


class BlockUpdate(Record, frozen=True, kw_only=True):
    """A change of the KV blocks that an instance has cached. It may be sent again."""

    added: Annotated[tuple[BlockHash, ...], Meta(max_length=MAX_HASHES_PER_UPDATE)] = ()
    removed: Annotated[tuple[BlockHash, ...], Meta(max_length=MAX_HASHES_PER_UPDATE)] = ()
    reset: bool = False
    """Whether all blocks published before are gone."""


class PublishBlocks(BlockUpdate, frozen=True, kw_only=True):
    """A BlockUpdate under the lease of its instance."""

    epoch: Epoch


class PublishedBlocks(Record, frozen=True, kw_only=True):
    """The answer to a BlockUpdate."""

    held: Annotated[int, Meta(examples=[417])]
    """Hashes of the instance that the control plane has now."""
    capacity: Annotated[int, Meta(examples=[MAX_HASHES_PER_INSTANCE])]
    """The most hashes that it keeps of an instance. If there are more, it forgets those from before
    the last update."""


class DrainRequest(Record, frozen=True, kw_only=True):
    """The time that an instance may take to finish its work."""

    deadline_seconds: Annotated[float, Meta(ge=0, le=7 * 24 * 3600)] = 60.0
    """Seconds after which the worker leaves even if it has not finished."""


class RoleChange(Record, frozen=True, kw_only=True):
    """The side that an instance takes from now on."""

    role: Role


class ChangeCause(Word):
    """The reason for a change of an instance."""

    REGISTERED = "registered"
    STATE_CHANGED = "state-changed"
    ROLE_CHANGED = "role-changed"
    DEREGISTERED = "deregistered"
    LEASE_EXPIRED = "lease-expired"


class Change(Record, frozen=True, kw_only=True):
    """A change of one instance. A heartbeat that only reports load is not a change."""

    id: int
    cause: ChangeCause
    instance: Instance
    """The instance after the change."""


class Snapshot(Record, frozen=True, kw_only=True):
    """Every live instance at the moment of change `id`. It replaces all earlier news."""

    id: int
    instances: tuple[Instance, ...]


def _members(spec: InstanceSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in InstanceSpec.__struct_fields__}
