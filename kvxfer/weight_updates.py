"""Weight updates as the control plane knows them: records of registry, REST API and client."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from kvxfer.instances import Epoch, InstanceId, ModelName, UnixTime
from kvxfer.model_identity import WeightsVersion
from kvxfer.record import Record, Word

UpdateId: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$",
        description="Names the update: letters, digits and . _ : -, at most 128 characters.",
        examples=["7c1e0b6a52d84f3f9a6d2c1b0e9f8a7d"],
    ),
]
_Version: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1, examples=[7])]

MAX_ENDED_UPDATES: Final = 100
"""So many updates that have ended are kept, the newest."""
_MAX_INSTANCES: Final = 10_000

_Served: TypeAlias = Annotated[WeightsVersion, Meta(examples=[6])]
_Digest: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{16}$", examples=["9f1c2a7be0d44c5e"])]
_Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1, examples=[2649000000000])]
_Pause: TypeAlias = Annotated[float, Meta(ge=0, le=1e9, examples=[0.21])]
_Code: TypeAlias = Annotated[
    str, Meta(pattern="^[a-z0-9-]{1,64}$", examples=["weight-update-aborted"])
]
_Text: TypeAlias = Annotated[
    str, Meta(max_length=2048, examples=["instance 'decode-0' is lost: its heartbeats stopped"])
]


class UpdatePolicy(Word):
    """What becomes of requests that run when an instance applies an update."""

    DRAIN = "drain"  # they end with the weights that they began with
    ABORT = "abort"  # they are aborted, and start again with the new weights
    KEEP = "keep"  # they go on with the new weights


class UpdateState(Word):
    """Where an update is in its life."""

    STAGING = "staging"  # weights are sent; all instances serve what they served
    COMMITTING = "committing"  # it was decided that all apply it
    COMMITTED = "committed"
    ABORTED = "aborted"


class PartState(Word):
    """Where an instance is in an update; it only ever moves forward."""

    RECEIVING = "receiving"
    STAGED = "staged"  # all its ranks have the weights
    COMMITTED = "committed"  # it serves them
    FAILED = "failed"
    LOST = "lost"  # nothing is heard of it any more

    @property
    def ended(self) -> bool:
        return self not in (PartState.RECEIVING, PartState.STAGED)


class Decision(StrEnum):
    """Whether all instances apply an update, or none does."""

    COMMIT = "commit"
    ABORT = "abort"


class UpdateError(Record, frozen=True, kw_only=True):
    """Why an update, or one instance in it, failed."""

    code: _Code
    """The stable name of the error, as kvxfer.errors has it."""
    message: _Text = ""


class AnnounceUpdate(Record, frozen=True, kw_only=True):
    """An update that a training job begins."""

    update_id: UpdateId | None = None
    """None lets the control plane make one. Announcing an update again under its id does no
    harm."""
    model: ModelName
    version: _Version
    """Greater than every version that the instances serve."""
    policy: UpdatePolicy = UpdatePolicy.DRAIN
    instances: Annotated[tuple[InstanceId, ...], Meta(max_length=_MAX_INSTANCES)] = ()
    """Those that take part; empty for all live instances of the model."""


class UpdatePart(Record, frozen=True, kw_only=True):
    """One instance in an update."""

    instance_id: InstanceId
    epoch: Epoch
    """The one that it lived under when the update was announced."""
    state: PartState = PartState.RECEIVING
    version: _Served = 0
    """Of the weights that it serves, as last told."""
    digest: _Digest | None = None
    """Of the weights that it has staged, or serves."""
    pause_seconds: _Pause | None = None
    """From its last step before to its first step after."""
    error: UpdateError | None = None


class PartReport(Record, frozen=True, kw_only=True):
    """News of one instance. What is left out stays as it was."""

    instance_id: InstanceId
    state: PartState | None = None
    """States only move forward: one behind the current state is ignored."""
    version: _Served | None = None
    digest: _Digest | None = None
    pause_seconds: _Pause | None = None
    error: UpdateError | None = None


class ReportUpdate(Record, frozen=True, kw_only=True):
    """What the coordinator tells of an update. What is left out stays as it was; with nothing in
    it, it only renews the lease."""

    state: Literal["committed", "aborted"] | None = None
    """How it ended."""
    error: UpdateError | None = None
    bytes: _Bytes | None = None
    instances: Annotated[tuple[PartReport, ...], Meta(max_length=_MAX_INSTANCES)] = ()


class DecideUpdate(Record, frozen=True, kw_only=True):
    """What the sender would decide."""

    decision: Decision


class Decided(Record, frozen=True, kw_only=True):
    """What was decided: the first decision, whichever was asked for later."""

    update_id: UpdateId
    version: _Version
    decision: Decision


class WeightUpdate(Record, frozen=True, kw_only=True):
    """One update of the weights of a model. Times are seconds since the Unix epoch."""

    update_id: UpdateId
    model: ModelName
    version: _Version
    policy: UpdatePolicy
    state: UpdateState
    decision: Decision | None = None
    """None as long as nothing is decided."""
    error: UpdateError | None = None
    bytes: _Bytes | None = None
    """Sent to all instances together; None as long as the coordinator has not told."""
    started_at: UnixTime
    decided_at: float | None = None
    ended_at: float | None = None
    """None while it is under way."""
    lease_seconds: Annotated[float, Meta(examples=[15.0])]
    """Without a report of the coordinator for this long it ends, as aborted if nothing is
    decided."""
    instances: tuple[UpdatePart, ...]

    @property
    def under_way(self) -> bool:
        return self.ended_at is None


class WeightUpdateList(Record, frozen=True, kw_only=True):
    """Updates under way and the last ones that have ended, the newest first."""

    updates: tuple[WeightUpdate, ...]
    stale_seconds: float | None = None
    """None where the list is current; else the registry cannot be reached, and this is what was
    known so many seconds ago."""
