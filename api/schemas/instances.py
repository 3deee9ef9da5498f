"""Bodies about instances.

What a worker writes about itself is taken as far as it is known: in an upgrade a newer worker may
meet an older control plane. What people and routers write is strict.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonDict

from kvxfer import instances as records
from kvxfer import model_identity as identities
from kvxfer.layout import HeadOrder, KvArrangement, KvLayout
from kvxfer.prefix_hashes import MAX_HASHES_PER_INSTANCE, from_text

InstanceId = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$",
        description="Names the instance: letters, digits and . _ : -, at most 128 characters.",
        examples=["prefill-0"],
    ),
]
Epoch = Annotated[
    int,
    Field(
        ge=1,
        le=2**63 - 1,
        description="Names one registration of an instance; a later one has a greater epoch.",
        examples=[1795046400000001],
    ),
]
# Numbers that any language's 32-bit signed integer can hold.
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
# JSON has no 64-bit numbers.
BlockHash = Annotated[
    str,
    Field(
        pattern=r"^[0-9a-f]{16}$",
        description="A 64-bit chain hash, 16 hexadecimal digits: it names a prefix of a prompt.",
        examples=["9f1c2a7be0d44c5e"],
    ),
]
# What feeds the autoscaler; null where it is not measured.
Measured = Annotated[float | None, Field(ge=0, le=1e12, allow_inf_nan=False)]
# What a client may ask for; an instance that is gone is not held any more.
LiveState = Literal["joining", "ready", "draining"]

_LAYOUT: JsonDict = {
    "num_layers": 28,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": "bfloat16",
    "block_size": 16,
    "tp_size": 1,
    "tp_rank": 0,
    "pp_size": 1,
    "pp_rank": 0,
    "order": "NHD",
    "kv": "separate",
    "mla": False,
    "packing": "",
    "layer_groups": [],
}
_IDENTITY: JsonDict = {
    "checkpoint": "5b0c2e9d7a4f41d38c6e1f2a90b7d3c4",
    "weights_version": 0,
    "model_dtype": "bfloat16",
    "quantization": "",
    "kv_scales": "",
    "rope": '{"rope_theta":500000.0,"rope_type":"default"}',
    "sliding_window": "",
    "connector": "vllm/1",
}
_SPEC: JsonDict = {
    "instance_id": "prefill-0",
    "role": "prefill",
    "model": "llama-3.2-3b",
    "engine_address": "kvx://10.0.0.5:7400/9f1c2a7be0d44c5e8a3b6d7f01e2c3d4",
    "http_address": "http://10.0.0.5:8000",
    "rank_addresses": [],
    "bootstrap_address": "",
    "layout": _LAYOUT,
    "num_blocks": 4096,
    "fabrics": ["local", "tcp"],
    "labels": {"zone": "eu-1a", "host": "node-5"},
    "identity": _IDENTITY,
    "kv_versions": [7, 8],
}
_INSTANCE: JsonDict = {
    **_SPEC,
    "epoch": 1795046400000001,
    "state": "ready",
    "registered_at": 1795046400.0,
    "heartbeat_at": 1795046460.0,
    "load": {"running": 3, "waiting": 1, "free_blocks": 3100, "cached_blocks": 812},
    "reserved": {"transfers": 1, "blocks": 12},
    "started": 0,
    "drain_deadline": None,
}


ModelName: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
KvVersion: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
EngineAddress: TypeAlias = Annotated[str, Field(pattern=r"^kvx://\S+$", max_length=512)]


class Layout(BaseModel):
    """How the KV cache of one rank lies in memory; all but the ranks is of the whole model."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_LAYOUT]})

    num_layers: PositiveCount
    num_kv_heads: PositiveCount = Field(description="Before tensor parallelism.")
    head_size: PositiveCount = Field(description="Elements of one head of one token.")
    dtype: str = Field(description="Element type as torch names it.", examples=["bfloat16"])
    block_size: PositiveCount = Field(description="Tokens per block.")
    tp_size: PositiveCount = 1
    tp_rank: Count = 0
    pp_size: PositiveCount = 1
    pp_rank: Count = 0
    order: HeadOrder = Field("NHD", description="Tokens before heads, or heads before tokens.")
    kv: KvArrangement = Field(
        "separate", description="K and V in two planes, in one, or in the engine's own order."
    )
    mla: bool = Field(False, description="K and V are one latent vector per token.")
    packing: str = Field(
        "", max_length=32, description="The name of the engine's own order, with `kv` opaque."
    )
    layer_groups: tuple[Count, ...] = Field(
        (),
        max_length=1 << 16,
        description="The KV cache group of each layer, where groups have block ids of their own.",
    )

    @model_validator(mode="after")
    def _is_a_layout(self) -> Layout:
        self.record()
        return self

    def record(self) -> KvLayout:
        return KvLayout(**self.model_dump())


_Said = Annotated[str, Field(max_length=4096)]


class ModelIdentity(BaseModel):
    """The model behind a KV cache: two instances make a pair only where every field is equal.

    An empty field is what the model does not have, or what its engine cannot tell.
    """

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_IDENTITY]})

    checkpoint: _Said = Field("", description="Digest of the weights, or a name given to them.")
    weights_version: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        0, description="Grows with each update of the weights in place."
    )
    model_dtype: _Said = Field("", description="Element type of what the model computes.")
    quantization: _Said = Field("", description="Of the weights.")
    kv_scales: _Said = Field("", description="How K and V were scaled.")
    rope: _Said = Field("", description="Settings of the rotary embedding, as canonical JSON.")
    sliding_window: _Said = Field("", description="Tokens that attention looks back.")
    connector: _Said = Field("", description="Conventions of the engine that both sides share.")

    def record(self) -> identities.ModelIdentity:
        return identities.ModelIdentity(**self.model_dump())


class Traffic(BaseModel):
    """What one worker has delivered to another over one fabric, over the last seconds."""

    model_config = ConfigDict(from_attributes=True)

    to: InstanceId
    fabric: Annotated[str, Field(min_length=1, max_length=32)]
    bytes_per_second: float = Field(ge=0, le=1e15, allow_inf_nan=False)


class Load(BaseModel):
    """What a worker says of itself with each heartbeat."""

    model_config = ConfigDict(from_attributes=True)

    running: Count = Field(0, description="Requests that are being computed.")
    waiting: Count = Field(0, description="Requests that are queued.")
    free_blocks: Count | None = Field(
        None, description="KV blocks that are free now; null where they are not counted."
    )
    cached_blocks: Count | None = Field(
        None,
        description=(
            "KV blocks that the prefix cache holds, in use or free; null where they are not "
            "counted."
        ),
    )
    queues: bool = Field(
        False,
        description=(
            "Whether a request for which there are no free blocks waits there. Otherwise it is "
            "refused, so the worker is not chosen."
        ),
    )
    requests_per_second: Measured = Field(None, description="Requests that arrive.")
    tokens_per_second: Measured = Field(
        None, description="Tokens of prompts that arrive at prefill, of output at decode."
    )
    ttft_p90: Measured = Field(
        None, description="90th percentile of the seconds to the first token."
    )
    itl_p90: Measured = Field(
        None, description="90th percentile of the seconds between two tokens."
    )
    sent: tuple[Traffic, ...] = Field(
        (), max_length=256, description="The KV cache that goes to each decode worker now."
    )
    models: tuple[ModelName, ...] = Field(
        (),
        max_length=1024,
        description="What requests may ask for beside the model: aliases, and loaded adapters.",
    )

    def record(self) -> records.Load:
        sent = tuple(records.Traffic(**each.model_dump()) for each in self.sent)
        return records.Load(**{**self.model_dump(exclude={"sent"}), "sent": sent})


class Reserved(BaseModel):
    """What open transfers hold of an instance."""

    model_config = ConfigDict(from_attributes=True)

    transfers: int
    blocks: int


class _Spec(BaseModel):
    instance_id: InstanceId
    role: records.Role
    model: ModelName = Field(description="Only instances of one model make a pair.")
    engine_address: EngineAddress = Field(description="Where the transfer engine listens.")
    http_address: str = Field(
        pattern=r"^https?://\S+$", max_length=512, description="Where the inference API listens."
    )
    layout: Layout
    num_blocks: PositiveCount = Field(description="KV blocks of one layer in the worker's pool.")
    fabrics: tuple[Annotated[str, Field(min_length=1, max_length=32)], ...] = Field(
        ("local", "tcp"),
        min_length=1,
        max_length=16,
        description="What the engine can transfer over, the best one first.",
    )
    rank_addresses: tuple[EngineAddress, ...] = Field(
        (),
        max_length=1024,
        description=(
            "Where the engine of each rank listens, stage by stage and in a stage by `tp_rank`; "
            "empty where the one at `engine_address` is all that is registered."
        ),
    )
    bootstrap_address: str = Field(
        "",
        pattern=r"^(\S+:\d{1,5})?$",
        max_length=512,
        description=(
            "Where the bootstrap server of a prefill instance of SGLang listens, `HOST:PORT`; "
            "requests for a pair with it go by SGLang's protocol."
        ),
    )
    labels: dict[Annotated[str, Field(max_length=63)], Annotated[str, Field(max_length=256)]] = (
        Field(
            default_factory=dict,
            max_length=64,
            description=(
                "Where it runs: `zone`, `rack`, `host` and `numa` decide which pairs are near; any "
                "other is for people."
            ),
        )
    )
    identity: ModelIdentity | None = Field(
        None, description="What its KV cache is of; null where the worker does not tell."
    )
    kv_versions: tuple[KvVersion, KvVersion] = Field(
        (7, 7),
        description="The oldest and the newest version of the KV protocol that it speaks.",
    )


class RegisterInstance(_Spec):
    """A worker that joins."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{**_SPEC, "state": "joining", "incarnation": "5b8e0c"}]}
    )

    state: Literal["joining", "ready"] = Field(
        "joining",
        description="`ready` for a worker that can take transfers at once.",
    )
    incarnation: str = Field(
        "",
        max_length=128,
        description=(
            "Random per process. A process that registers again while it still holds the id "
            "itself gets a new epoch instead of instance-exists."
        ),
    )

    @field_validator("instance_id")
    @classmethod
    def _is_no_route(cls, instance_id: str) -> str:
        if instance_id == "watch":
            raise ValueError("'watch' is the name of a route; choose another instance_id")
        return instance_id

    @model_validator(mode="after")
    def _has_an_address_for_each_rank(self) -> RegisterInstance:
        ranks = self.layout.tp_size * self.layout.pp_size
        if self.rank_addresses and len(self.rank_addresses) != ranks:
            raise ValueError(
                f"rank_addresses has {len(self.rank_addresses)} addresses, the layout {ranks} "
                "ranks; give the address of each, or none"
            )
        return self

    @field_validator("kv_versions")
    @classmethod
    def _is_a_range(cls, versions: tuple[int, int]) -> tuple[int, int]:
        if versions[0] > versions[1]:
            raise ValueError(f"{list(versions)} is no range; give the oldest version first")
        return versions

    def record(self) -> records.InstanceSpec:
        return records.InstanceSpec(
            instance_id=self.instance_id,
            role=self.role,
            model=self.model,
            engine_address=self.engine_address,
            http_address=self.http_address,
            layout=self.layout.record(),
            num_blocks=self.num_blocks,
            fabrics=self.fabrics,
            rank_addresses=self.rank_addresses,
            bootstrap_address=self.bootstrap_address,
            labels=self.labels,
            identity=None if self.identity is None else self.identity.record(),
            kv_versions=self.kv_versions,
        )


class Instance(_Spec):
    """A registered worker. Times are seconds since the Unix epoch."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_INSTANCE]})

    epoch: Epoch
    state: records.InstanceState
    registered_at: float
    heartbeat_at: float
    load: Load
    reserved: Reserved
    started: int = Field(
        description=(
            "Transfers to it that were released since it last told its load: requests that it "
            "decodes and has not told of. Pairing takes them for running ones."
        )
    )
    drain_deadline: float | None = Field(
        None,
        description="Until when it may finish what it has; null where nobody drains it.",
    )


class InstanceList(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"instances": [_INSTANCE], "stale_seconds": None}]}
    )

    instances: list[Instance]
    stale_seconds: float | None = Field(
        description=(
            "Null where the list is current; else the registry cannot be reached, and this is what "
            "was known so many seconds ago."
        )
    )


class Heartbeat(BaseModel):
    """A sign of life. What is left out stays as it was."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "epoch": 1795046400000001,
                    "state": "ready",
                    "load": {"running": 3, "waiting": 1, "free_blocks": 3100, "cached_blocks": 812},
                }
            ]
        }
    )

    epoch: Epoch
    state: LiveState | None = Field(
        None, description="States only move forward: one behind the current state is ignored."
    )
    load: Load | None = None


class Lease(BaseModel):
    """The answer to a registration and to each heartbeat."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "examples": [
                {
                    "instance_id": "prefill-0",
                    "epoch": 1795046400000001,
                    "state": "ready",
                    "lease_seconds": 6.0,
                    "heartbeat_interval": 2.0,
                    "role": "prefill",
                    "reserved": {"transfers": 1, "blocks": 12},
                    "drain_seconds": None,
                }
            ]
        },
    )

    instance_id: InstanceId
    epoch: Epoch
    state: records.InstanceState = Field(
        description="As the control plane holds it: `draining` tells a worker that it is drained."
    )
    lease_seconds: float = Field(
        description="Without a heartbeat for this long the instance is gone."
    )
    heartbeat_interval: float = Field(description="Seconds between heartbeats.")
    role: records.Role = Field(
        description="As the control plane holds it: another one tells a worker to change sides."
    )
    reserved: Reserved = Field(
        description="What open transfers hold: requests that may still be on their way."
    )
    drain_seconds: float | None = Field(
        None, description="How long a worker that is drained may still take; null for others."
    )


class BlockUpdate(BaseModel):
    """What changed about the KV blocks that a worker has cached. It may be sent again."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"epoch": 1795046400000001, "added": ["9f1c2a7be0d44c5e"], "removed": []}]
        }
    )

    epoch: Epoch
    added: list[BlockHash] = Field(
        default_factory=list,
        max_length=MAX_HASHES_PER_INSTANCE,
        description="The newest last; those that were there already count as new.",
    )
    removed: list[BlockHash] = Field(default_factory=list, max_length=MAX_HASHES_PER_INSTANCE)
    reset: bool = Field(False, description="Whether `added` is all there is.")

    def record(self) -> records.BlockUpdate:
        return records.BlockUpdate(
            added=from_text(self.added), removed=from_text(self.removed), reset=self.reset
        )


class PublishedBlocks(BaseModel):
    """How many block hashes the control plane has of an instance now."""

    model_config = ConfigDict(
        from_attributes=True, json_schema_extra={"examples": [{"held": 417, "capacity": 1024}]}
    )

    held: int
    capacity: int = Field(description="How many it keeps: the newest.")


class DrainRequest(BaseModel):
    """How long an instance may take to finish what it has."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"deadline_seconds": 120.0}]}
    )

    deadline_seconds: Annotated[
        float,
        Field(ge=0, le=7 * 24 * 3600, description="After that the worker leaves all the same."),
    ] = 60.0


class RoleChange(BaseModel):
    """The side that an instance takes from now on."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"role": "decode"}]})

    role: records.Role


class Change(BaseModel):
    """The data of a `change` event. Heartbeats that only report load are no change."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "examples": [{"id": 1795046400000002, "cause": "state-changed", "instance": _INSTANCE}]
        },
    )

    id: int
    cause: records.ChangeCause
    instance: Instance = Field(description="The instance after the change.")


class Snapshot(BaseModel):
    """The data of a `snapshot` event: it replaces whatever the reader knew before."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={"examples": [{"id": 1795046400000001, "instances": [_INSTANCE]}]},
    )

    id: int
    instances: list[Instance]
