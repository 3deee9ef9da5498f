"""Every error that kvxfer raises, as one hierarchy.

`code` is the stable machine name: the same word appears in native completions, REST problem
details, metrics labels and `--json` output. The message says what failed, with whom, and what
to do about it.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar


class KvxferError(Exception):
    """Base of all kvxfer errors."""

    code: ClassVar[str] = "error"


_Error = TypeVar("_Error", bound=KvxferError)


class InvalidArgument(KvxferError, ValueError):
    """The caller passed an invalid argument."""

    code = "invalid-argument"


class NotBuilt(KvxferError, ImportError):
    """A part that has to be compiled or installed first is missing."""

    code = "not-built"


# --- engine ----------------------------------------------------------------------------------


class EngineError(KvxferError):
    """An operation of the transfer engine failed."""

    code = "engine-error"


class EngineClosed(EngineError):
    code = "engine-closed"


class AddressInUse(EngineError):
    """The port the engine (or a server) should listen on is taken."""

    code = "address-in-use"


class OutOfMemory(EngineError):
    code = "out-of-memory"


class UnknownRegion(EngineError):
    """The memory region key is not registered at the receiver: foreign, stale or mistyped."""

    code = "unknown-region"


class OutOfBounds(EngineError):
    """A page, offset or length leaves its memory region."""

    code = "out-of-bounds"


class StaleCounter(EngineError):
    """The immediate names a counter (slot and generation) that is not live at the receiver."""

    code = "stale-counter"


class Cancelled(EngineError):
    """The operation was cancelled by its caller."""

    code = "cancelled"


class DeadlineExceeded(EngineError, TimeoutError):
    """A wait reached its deadline."""

    code = "deadline-exceeded"


class Backpressure(EngineError):
    """Too much is already queued for this peer."""

    code = "backpressure"


class MessageTooLarge(EngineError):
    code = "message-too-large"


class PermissionDenied(EngineError):
    """The operating system refuses what the fabric needs."""

    code = "permission-denied"


class FabricUnavailable(EngineError):
    """The requested fabric is not part of this build or not on this host."""

    code = "fabric-unavailable"


class GpuLost(EngineError):
    """A GPU whose memory is moved failed, here or at the peer; its process has to be restarted."""

    code = "gpu-lost"


class PeerError(EngineError):
    """Communication with a peer failed."""

    code = "peer-error"


class ConnectFailed(PeerError):
    """The address does not answer, or not in this protocol."""

    code = "connect-failed"


class AuthenticationFailed(PeerError):
    """The peer does not know the cluster key."""

    code = "authentication-failed"


class PeerRestarted(PeerError):
    """Another engine (a new epoch) answers at the address of the wanted one."""

    code = "peer-restarted"


class ProtocolError(PeerError):
    """The peer violated the protocol: it has another version, or a defect."""

    code = "protocol-error"


class NicLost(PeerError):
    """The NICs between the two engines, or their links, failed."""

    code = "nic-lost"


class PeerLost(PeerError):
    """The connection to the peer ended: the peer exited, crashed or disconnected."""

    code = "peer-lost"


class PeerTimeout(PeerLost):
    """The peer's heartbeats stopped: it is frozen, or its host is cut off."""

    code = "peer-timeout"


# --- KV transfers ----------------------------------------------------------------------------


class TransferError(KvxferError):
    """A KV transfer failed."""

    code = "transfer-error"


class LayoutMismatch(TransferError):
    """The two KV caches are of different models, or their layouts cannot be mapped."""

    code = "layout-mismatch"

    def __init__(self, field: str, prefill: object, decode: object) -> None:
        self.field, self.prefill, self.decode = field, prefill, decode
        super().__init__(
            f"the KV caches do not match: {field} is {prefill!r} at prefill and {decode!r} at "
            f"decode; start both instances with the same {field}"
        )


class TicketInvalid(TransferError):
    """The ticket is forged, damaged, or names another pair, epoch or transfer."""

    code = "ticket-invalid"


class TicketExpired(TicketInvalid):
    code = "ticket-expired"


class ChecksumMismatch(TransferError):
    """The blocks that arrived are not those that prefill sent."""

    code = "checksum-mismatch"


class LeaseExpired(TransferError, TimeoutError):
    """A lease ran out before the other side did its part."""

    code = "lease-expired"


class TransferCancelled(TransferError):
    """The other side, or the caller, cancelled the transfer."""

    code = "transfer-cancelled"


class TransferRefused(TransferError):
    """The other side, or this one, does not accept the transfer."""

    code = "transfer-refused"


class BlockPoolExhausted(TransferError):
    """Not enough free KV blocks."""

    code = "block-pool-exhausted"


class BlockStateError(TransferError):
    """A KV block was used in a way that its state does not allow."""

    code = "block-state"


class PromptTooLong(TransferError, ValueError):
    """The prompt does not fit the KV cache or the model's context."""

    code = "prompt-too-long"


# --- weight updates --------------------------------------------------------------------------


class WeightUpdateError(KvxferError):
    """An update of a model's weights failed. `report` is the UpdateReport, if there is one."""

    code = "weight-update-error"
    report: object = None


class WeightUpdateAborted(WeightUpdateError):
    """Not all ranks have staged the update: none applies it, and all serve the old weights."""

    code = "weight-update-aborted"


class WeightsMismatch(WeightUpdateError):
    """The pushed weights do not fit those that inference ranks want or serve, or those that the
    same training ranks held before. The same push would be refused again."""

    code = "weights-mismatch"


class NotStaged(WeightUpdateError):
    """The rank has not staged the update that it is to apply."""

    code = "not-staged"


class DigestMismatch(WeightUpdateError):
    """The weights that arrived are not those that the training rank sent."""

    code = "digest-mismatch"


class WrongVersion(WeightUpdateError):
    """The request demands another version of the weights than the one that is served."""

    code = "wrong-version"


class RequestAborted(WeightUpdateError):
    """The request was aborted by an update of the weights; its output is lost. Send it again."""

    code = "request-aborted"


class RankLost(KvxferError):
    """One of the processes that compute a model together has ended, failed or hung. The others end
    too: start the instance again."""

    code = "rank-lost"


# --- mixture of experts ----------------------------------------------------------------------


class RankExcluded(KvxferError):
    """The other ranks of a MoE group continue without this one, which was frozen or cut off. Close
    the group, and join it again."""

    code = "rank-excluded"


class StepRefused(KvxferError):
    """Another rank of a MoE group could not begin this step, so no rank runs it. The group
    continues with the next step."""

    code = "step-refused"


class MoeGroupLost(KvxferError):
    """Too few ranks of a MoE group are left: start it again."""

    code = "moe-group-lost"


# --- control plane ---------------------------------------------------------------------------


class ControlPlaneError(KvxferError):
    """The control plane refused or failed a request.

    `details` are further facts by name, such as the `reasons` of NoCapacity; over REST they are
    the extension members of the problem document. `request_id` names the request in the logs of
    the control plane, if one received it.
    """

    code = "control-plane-error"

    def __init__(self, message: str, /, **details: object) -> None:
        super().__init__(message)
        self.details = details
        self.request_id: str | None = None


class ControlPlaneUnavailable(ControlPlaneError):
    """No control plane answers, or it cannot serve now.

    `hurried`: the deadline left too little of the client's timeout to conclude that there is no
    answer.
    """

    code = "control-plane-unavailable"
    hurried = False


class InstanceExists(ControlPlaneError):
    """Another live instance holds this id."""

    code = "instance-exists"


class InstanceLeaving(ControlPlaneError):
    """The worker has begun to leave, so its drain cannot be undone."""

    code = "instance-leaving"


class UnknownInstance(ControlPlaneError):
    code = "unknown-instance"


class StaleEpoch(ControlPlaneError):
    """The instance's lease expired, or a newer registration replaced it."""

    code = "stale-epoch"


class NotAggregating(ControlPlaneError):
    """No instance of the model serves requests alone, and no pair can serve this request."""

    code = "not-aggregating"


class NoCapacity(ControlPlaneError):
    """No ready prefill/decode pair can take the request now."""

    code = "no-capacity"


class UnknownTransfer(ControlPlaneError):
    code = "unknown-transfer"


class UnknownBlockTable(ControlPlaneError):
    """The transfer is open, and decode has not sent its block table yet."""

    code = "unknown-block-table"


class UnknownTrace(ControlPlaneError):
    """The control plane has no spans of the request."""

    code = "unknown-trace"


class TransferExists(ControlPlaneError):
    """Another request has opened a transfer under this id."""

    code = "transfer-exists"


class BlockTableExists(ControlPlaneError):
    """The transfer already has another block table."""

    code = "block-table-exists"


class BlockTableMismatch(ControlPlaneError):
    """The block table is of another transfer, pair or epoch than the one it was sent for."""

    code = "block-table-mismatch"


class UnknownWeightUpdate(ControlPlaneError):
    code = "unknown-weight-update"


class WeightUpdateExists(ControlPlaneError):
    """Another update of the model is under way, or another update has this id."""

    code = "weight-update-exists"


class OldVersion(ControlPlaneError):
    """The version of an update is not greater than one that an instance serves."""

    code = "old-version"


class WeightUpdateDecided(ControlPlaneError):
    """The weight update was already decided otherwise."""

    code = "weight-update-decided"


class Unauthenticated(ControlPlaneError):
    """The request carries no bearer token, or one that the control plane does not know."""

    code = "unauthenticated"


class Forbidden(ControlPlaneError):
    """The token is known, but has none of the scopes that the route requires, or the call acts as
    an instance without its secret."""

    code = "forbidden"


class RateLimited(ControlPlaneError):
    """The caller sends more requests than it may. It may retry after
    `details["retry_after_seconds"]`."""

    code = "rate-limited"


class BodyTooLarge(ControlPlaneError):
    code = "body-too-large"


class UntrustedCertificate(ControlPlaneError):
    """TLS failed: one side does not accept the certificate of the other."""

    code = "untrusted-certificate"


# --- pairing ---------------------------------------------------------------------------------


class ScorerFailed(KvxferError):
    """Another package's scorer returned no number by which pairs can be compared."""

    code = "scorer-failed"


# --- scaling ---------------------------------------------------------------------------------


class ScalingFailed(KvxferError):
    """A scaling decision could not be carried out."""

    code = "scaling-failed"


class NotLeader(KvxferError):
    """Another control-plane replica now leads the autoscaling; nothing was written."""

    code = "not-leader"


def by_code(code: str) -> type[KvxferError]:
    """Returns the error class of a code; `KvxferError` if the code is unknown."""
    pending: list[type[KvxferError]] = [KvxferError]
    while pending:
        candidate = pending.pop()
        if candidate.code == code:
            return candidate
        pending.extend(candidate.__subclasses__())
    return KvxferError


def without_traceback(error: _Error) -> _Error:
    """Returns the same error without a traceback, for an error that is kept or raised again. A
    traceback keeps alive the frames that the error passed, with their local variables."""
    again = type(error).__new__(type(error), *error.args)
    again.__dict__.update(error.__dict__)
    return again
