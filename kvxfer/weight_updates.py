"""Records of weight updates, shared by registry, REST API and client."""

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
        description="The update's id: letters, digits and . _ : -, at most 128 characters.",
        examples=["7c1e0b6a52d84f3f9a6d2c1b0e9f8a7d"],
    ),
]
_Version: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1, examples=[7])]

MAX_ENDED_UPDATES: Final = 100
"""The number of ended updates that are kept, the newest ones."""
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
    """The fate of requests that run when an instance applies an update."""

    DRAIN = "drain"  # they end with the weights that they began with
    ABORT = "abort"  # they are aborted, and start again with the new weights
    KEEP = "keep"  # they continue with the new weights


class UpdateState(Word):
    """The stage of an update's life."""

    STAGING = "staging"  # weights are sent; all instances serve the old ones
    COMMITTING = "committing"  # the decision is that all instances apply it
    COMMITTED = "committed"
    ABORTED = "aborted"


class PartState(Word):
    """The stage of an instance in an update. Stages only move forward."""

    RECEIVING = "receiving"
    STAGED = "staged"  # all its ranks have the weights
    COMMITTED = "committed"  # it serves them
    FAILED = "failed"
    LOST = "lost"  # it no longer reports

    @property
    def ended(self) -> bool:
        return self not in (PartState.RECEIVING, PartState.STAGED)


class Decision(StrEnum):
    """A decision about an update: all instances apply it, or none does."""

    COMMIT = "commit"
    ABORT = "abort"


class UpdateError(Record, frozen=True, kw_only=True):
    """The error of an update or of one instance in it."""

    code: _Code
    """Stable name of the error, as in kvxfer.errors."""
    message: _Text = ""


class AnnounceUpdate(Record, frozen=True, kw_only=True):
    """An update that a training job begins."""

    update_id: UpdateId | None = None
    """The update's id; if None, the control plane makes one. With an id the announcement may be
    repeated."""
    model: ModelName
    version: _Version
    """New version, greater than every version that the instances serve."""
    policy: UpdatePolicy = UpdatePolicy.DRAIN
    instances: Annotated[tuple[InstanceId, ...], Meta(max_length=_MAX_INSTANCES)] = ()
    """Instances that take part; empty for all live instances of the model."""


class UpdatePart(Record, frozen=True, kw_only=True):
    """One instance in an update."""

    instance_id: InstanceId
    epoch: Epoch
    """Epoch of the instance when the update was announced."""
    state: PartState = PartState.RECEIVING
    version: _Served = 0
    """Version of the weights that it serves, as last reported."""
    digest: _Digest | None = None
    """Digest of the weights that it has staged or serves."""
    pause_seconds: _Pause | None = None
    """Seconds from its last step before the update to its first step after it."""
    error: UpdateError | None = None


class PartReport(Record, frozen=True, kw_only=True):
    """A report on one instance. Members that are left out stay as they were."""

    instance_id: InstanceId
    state: PartState | None = None
    """State of the instance. States only move forward: one behind the current state is ignored."""
    version: _Served | None = None
    digest: _Digest | None = None
    pause_seconds: _Pause | None = None
    error: UpdateError | None = None


class ReportUpdate(Record, frozen=True, kw_only=True):
    """The coordinator's report on an update. Members that are left out stay as they were. An empty
    report only renews the lease."""

    state: Literal["committed", "aborted"] | None = None
    """Final state, if the update has ended."""
    error: UpdateError | None = None
    bytes: _Bytes | None = None
    instances: Annotated[tuple[PartReport, ...], Meta(max_length=_MAX_INSTANCES)] = ()


class DecideUpdate(Record, frozen=True, kw_only=True):
    """The decision that the sender asks for."""

    decision: Decision


class Decided(Record, frozen=True, kw_only=True):
    """The decision that holds: the first one, whatever was asked for later."""

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
    """Decision about the update; None while there is none."""
    error: UpdateError | None = None
    bytes: _Bytes | None = None
    """Bytes sent to all instances together; None until the coordinator reports them."""
    started_at: UnixTime
    decided_at: float | None = None
    ended_at: float | None = None
    """End of the update; None while it is under way."""
    lease_seconds: Annotated[float, Meta(examples=[15.0])]
    """Seconds without a report of the coordinator after which the update ends, as aborted if there
    is no decision."""
    instances: tuple[UpdatePart, ...]

    @property
    def under_way(self) -> bool:
        return self.ended_at is None


class WeightUpdateList(Record, frozen=True, kw_only=True):
    """Updates under way and the last ones that have ended, the newest first."""

    updates: tuple[WeightUpdate, ...]
    stale_seconds: float | None = None
    """Age of the list in seconds if the registry cannot be reached; None if the list is current."""
