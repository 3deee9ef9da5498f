"""Every error that kvxfer raises, and all that is said about it.

    KvxferError
      InvalidArgument, NotBuilt, ProcessFailed
      EngineError
        EngineClosed, AddressInUse, OutOfMemory, UnknownRegion, OutOfBounds, StaleCounter,
        Cancelled, DeadlineExceeded, Backpressure, MessageTooLarge, PermissionDenied,
        FabricUnavailable, GpuLost
        PeerError
          ConnectFailed, AuthenticationFailed, PeerRestarted, ProtocolError, NicLost
          PeerLost
            PeerTimeout
      TransferError
        LayoutMismatch
        TicketInvalid
          TicketExpired
        ChecksumMismatch, LeaseExpired, TransferCancelled, TransferRefused, BlockPoolExhausted,
        BlockStateError, PromptTooLong
      WeightUpdateError
        WeightUpdateAborted, WeightsMismatch, NotStaged, DigestMismatch, DecisionUnknown,
        WrongVersion, RequestAborted
      RankLost, RankExcluded, StepRefused, MoeGroupLost
      ControlPlaneError
        ControlPlaneUnavailable, InstanceExists, InstanceLeaving, UnknownInstance, StaleEpoch,
        NotAggregating, NoCapacity, UnknownTransfer, UnknownBlockTable, UnknownTrace,
        TransferExists, BlockTableExists, BlockTableMismatch, UnknownWeightUpdate,
        WeightUpdateExists, OldVersion, WeightUpdateDecided, Unauthenticated, Forbidden,
        RateLimited, BodyTooLarge, UntrustedCertificate
      ScorerFailed, ScalingFailed, NotLeader, UnknownModel, InvalidApiKey, TooManyWrongKeys,
      Overloaded, WorkerError, WorkerKeyRefused
      BenchError
        WrongBytes, NotAvailableHere

`code` is the stable machine name: the same word appears in native completions, REST problem
details, metrics labels and `--json` output. The first paragraph of a class's docstring is its
meaning, `remedy` what to do about it. docs/errors.md is made from them. An error's own message says
what failed, with whom, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, TypeVar


class KvxferError(Exception):
    """Base of all kvxfer errors.

    `details` are further facts by name, such as the `reasons` of NoCapacity. Over REST they are the
    extension members of the problem document.
    """

    code: ClassVar[str] = "error"
    remedy: ClassVar[str] = ""
    status: int = 500
    """The HTTP status at the control plane and the reference worker."""
    router_status: int = 502
    """The HTTP status at the router. Most errors are those of a server behind it."""
    members: ClassVar[tuple[str, ...]] = ()
    """The names that `details` can have."""

    def __init__(self, message: str = "", /, **details: object) -> None:
        super().__init__(message)
        self.details = details


_Error = TypeVar("_Error", bound=KvxferError)


class InvalidArgument(KvxferError, ValueError):
    """An option, a field or an argument cannot be used. Over REST, `field` names the first at
    fault, and `errors` has the `location`, `field` and `message` of each."""

    code = "invalid-argument"
    status = 422
    router_status = 400
    remedy = "Correct what the message names."
    members = ("field", "errors", "param")


class NotBuilt(KvxferError, ImportError):
    """A part that has to be compiled or installed first is missing."""

    code = "not-built"
    status = 501
    remedy = "Install the part that the message names."


class ProcessFailed(KvxferError):
    """A `kvxfer` command that another one started has exited, or did not become ready."""

    code = "process-failed"
    remedy = "Read the end of its output, which the message has."

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# --- engine ----------------------------------------------------------------------------------


class EngineError(KvxferError):
    """An operation of the transfer engine failed."""

    code = "engine-error"


class EngineClosed(EngineError):
    """The engine was closed before the operation ended."""

    code = "engine-closed"
    status = 503
    remedy = "Close an engine after its last operation."


class AddressInUse(EngineError):
    """The port that the engine (or a server) should listen on is taken."""

    code = "address-in-use"
    remedy = "Use another port, or 0."


class OutOfMemory(EngineError):
    """The host, the GPU or a limit of the process has too little memory or too few files."""

    code = "out-of-memory"
    remedy = "Raise the limit that the message names, or register less memory."


class UnknownRegion(EngineError):
    """A write names memory that is not registered at the receiver, or a grant for another peer."""

    code = "unknown-region"
    remedy = "Correct the caller, unless the peer deregistered the memory meanwhile."


class OutOfBounds(EngineError):
    """A page, offset or length leaves its memory region."""

    code = "out-of-bounds"
    remedy = "Correct the caller, unless the peer deregistered the memory meanwhile."


class StaleCounter(EngineError):
    """The immediate names a counter (slot and generation) that is not live at the receiver: the
    transfer was cancelled meanwhile, and the pages are safe."""

    code = "stale-counter"
    remedy = "Open a new transfer if the pages are still wanted."


class Cancelled(EngineError):
    """The operation was cancelled by its caller."""

    code = "cancelled"
    remedy = "Nothing has to be done."


class DeadlineExceeded(EngineError, TimeoutError):
    """A wait reached its deadline."""

    code = "deadline-exceeded"
    status = router_status = 504
    remedy = "Look at the side that was waited for, or allow more time."


class Backpressure(EngineError):
    """Too much is already queued for this peer."""

    code = "backpressure"
    remedy = "Wait for operations to complete."


class MessageTooLarge(EngineError):
    """A message has more bytes than a message may have."""

    code = "message-too-large"
    remedy = "Use writes."


class PermissionDenied(EngineError):
    """The operating system refuses what the fabric needs, such as to read the peer's registered
    memory where tcp is off."""

    code = "permission-denied"
    remedy = "Use memory from `alloc()`, enable tcp, or grant the right that the message names."


class FabricUnavailable(EngineError):
    """The requested fabric is not part of this build or not on this host."""

    code = "fabric-unavailable"
    remedy = "Run `kvxfer doctor`, or leave the fabric out."


class GpuLost(EngineError):
    """A GPU whose memory is moved failed, here or at the peer."""

    code = "gpu-lost"
    remedy = "Look for Xid messages in the kernel log, and restart that process."


class PeerError(EngineError):
    """Communication with a peer failed."""

    code = "peer-error"
    status = 502


class ConnectFailed(PeerError):
    """Nothing answers at the address, or something that is no engine, or a frozen engine."""

    code = "connect-failed"
    remedy = "Check the address, and that the peer runs."


class AuthenticationFailed(PeerError):
    """The peer does not know the cluster key."""

    code = "authentication-failed"
    remedy = "Give both sides the same cluster key."


class PeerRestarted(PeerError):
    """Another engine (a new epoch) runs at the address of the wanted one."""

    code = "peer-restarted"
    remedy = "Ask the control plane for the new one."


class ProtocolError(PeerError):
    """The peer sent what the protocol does not allow, as it has another version or a defect; or it
    sent more writes than a program waits for."""

    code = "protocol-error"
    remedy = (
        "Run the same version on both sides, or report a defect; wait for the sum of `immediates` "
        "of all operations."
    )


class NicLost(PeerError):
    """The NICs between the two engines, or their links, failed."""

    code = "nic-lost"
    remedy = "Check cable, switch and driver."


class PeerLost(PeerError):
    """The connection to the peer ended: the peer exited, crashed or disconnected."""

    code = "peer-lost"
    remedy = "Take another pair."


class PeerTimeout(PeerLost):
    """The peer's heartbeats stopped: it is frozen, or its host is cut off."""

    code = "peer-timeout"
    remedy = "Take another pair; check its host."


# --- KV transfers ----------------------------------------------------------------------------


class TransferError(KvxferError):
    """A KV transfer failed."""

    code = "transfer-error"


class LayoutMismatch(TransferError):
    """Two KV caches belong to different models, or their layouts do not map onto each other. The
    field `checkpoint` is the digest of the weights."""

    code = "layout-mismatch"
    status = 409
    remedy = (
        "Start both instances with the same value of the field; for `tp_size` and `pp_size`, "
        "register `rank_addresses`."
    )
    members = ("field", "prefill", "decode")

    def __init__(self, field: str, prefill: object, decode: object) -> None:
        self.field, self.prefill, self.decode = field, prefill, decode
        super().__init__(
            f"the KV caches do not match: {field} is {prefill!r} at prefill and {decode!r} at "
            f"decode; start both instances with the same {field}",
            field=field,
            prefill=prefill,
            decode=decode,
        )


class TicketInvalid(TransferError):
    """The ticket, or the signature of a block table, is forged, damaged, or not valid for this
    pair, epoch or transfer, or the ticket was signed in this host's future."""

    code = "ticket-invalid"
    status = 403
    remedy = (
        "Give the control plane and all workers the same keys, and synchronise their clocks; see "
        "docs/security.md#clocks."
    )


class TicketExpired(TicketInvalid):
    """The ticket has expired, or this host's clock is ahead of its signer's."""

    code = "ticket-expired"
    remedy = "Send the request again."


class ChecksumMismatch(TransferError):
    """The blocks changed on the way; they are not used."""

    code = "checksum-mismatch"
    status = 502
    remedy = "Check memory, NICs and drivers on both hosts."


class LeaseExpired(TransferError, TimeoutError):
    """A lease ran out before the other side did its part."""

    code = "lease-expired"
    status = router_status = 504
    remedy = "Retry; check the other worker."


class TransferCancelled(TransferError):
    """The other side, or the caller, cancelled the transfer."""

    code = "transfer-cancelled"
    status = 409
    remedy = "Unless the request was aborted, see the log of the other side."


class TransferRefused(TransferError):
    """The other side, or this one, accepts no transfer now: its KV cache has no memory (vLLM's
    sleep mode), for example."""

    code = "transfer-refused"
    status = 409
    remedy = "Take another pair."


class BlockPoolExhausted(TransferError):
    """Not enough free KV blocks."""

    code = "block-pool-exhausted"
    status = router_status = 503
    remedy = "Add blocks, or send fewer requests at once."


class BlockStateError(TransferError):
    """A KV block was used in a state that forbids it, such as after its release; nothing was
    changed."""

    code = "block-state"
    remedy = "Report a defect of the inference engine or its connector."


class PromptTooLong(TransferError, ValueError):
    """The prompt does not fit the model's context, or the KV cache of any ready instance."""

    code = "prompt-too-long"
    status = 422
    router_status = 400
    remedy = "Shorten the prompt, or add blocks."


# --- weight updates --------------------------------------------------------------------------


class WeightUpdateError(KvxferError):
    """An update of a model's weights failed.

    `report` is the UpdateReport, if there is one.
    """

    code = "weight-update-error"
    report: object = None


class WeightUpdateAborted(WeightUpdateError):
    """Not all ranks have staged the update: none applies it, and all serve the old weights."""

    code = "weight-update-aborted"
    remedy = "Push the version again."


class WeightsMismatch(WeightUpdateError):
    """The pushed weights do not fit those that inference ranks want or serve, or those that the
    same training ranks held before, or the version is not greater than the present one. The same
    push would be refused again."""

    code = "weights-mismatch"
    remedy = "Push a greater version, or begin anew at all training ranks (`weights.forget`)."


class NotStaged(WeightUpdateError):
    """The rank has not staged the update that it is to apply; nothing was applied."""

    code = "not-staged"
    remedy = "Push the version again."


class DigestMismatch(WeightUpdateError):
    """The weights that arrived are not those that the training rank sent."""

    code = "digest-mismatch"
    remedy = "Have training wait for `read()`; check memory, NICs and drivers."


class DecisionUnknown(WeightUpdateError):
    """The control plane did not say whether the update is committed, so members may not be told any
    decision. The instances ask for it."""

    code = "decision-unknown"
    remedy = "Look at the instances' versions."


class WrongVersion(WeightUpdateError):
    """The request demands a version of the weights that is not served."""

    code = "wrong-version"
    status = 409
    remedy = "Demand the served version, or none."


class RequestAborted(WeightUpdateError):
    """The request was aborted by an update of the weights; its output is lost."""

    code = "request-aborted"
    status = 503
    remedy = "Send it again."


class RankLost(KvxferError):
    """One of the processes that compute a model together has ended, failed or hung. The others end
    too."""

    code = "rank-lost"
    remedy = "Start the instance again."


# --- mixture of experts ----------------------------------------------------------------------


class RankExcluded(KvxferError):
    """The other ranks of a MoE group continue without this one, which was frozen or cut off."""

    code = "rank-excluded"
    remedy = "Close the group there, and join it again; see docs/moe.md."


class StepRefused(KvxferError):
    """Another rank of a MoE group could not begin this step, so no rank runs it."""

    code = "step-refused"
    remedy = "Continue with the next step; see docs/moe.md#refused-steps."


class MoeGroupLost(KvxferError):
    """A MoE group has fewer than `min_ranks` ranks left."""

    code = "moe-group-lost"
    remedy = "Start the group again."


# --- control plane ---------------------------------------------------------------------------


class ControlPlaneError(KvxferError):
    """The control plane refused or failed a request.

    `request_id` names the request in the logs of the control plane, if one received it.
    """

    code = "control-plane-error"

    def __init__(self, message: str, /, **details: object) -> None:
        super().__init__(message, **details)
        self.request_id: str | None = None


class ControlPlaneUnavailable(ControlPlaneError):
    """No control plane answers, it is stopping, or its registry is unavailable. Workers and
    transfers continue.

    `hurried`: the deadline left too little of the client's timeout to conclude that there is no
    answer.
    """

    code = "control-plane-unavailable"
    status = router_status = 503
    remedy = "Start a control plane, or bring Redis back."
    hurried = False


class InstanceExists(ControlPlaneError):
    """Another live instance holds this `instance_id`."""

    code = "instance-exists"
    status = 409
    remedy = (
        "Leave `instance_id` out, or make it unique for each replica; a worker that replaces "
        "another waits until that one's lease ends."
    )
    members = ("instance_id", "epoch", "lease_remaining_seconds")


class InstanceLeaving(ControlPlaneError):
    """The worker has begun to leave, so its drain cannot be undone."""

    code = "instance-leaving"
    status = 409
    remedy = "Start it again when it has left."
    members = ("instance_id",)


class UnknownInstance(ControlPlaneError):
    """No live instance has this id. A worker whose lease has expired registers again by itself."""

    code = "unknown-instance"
    status = 404
    remedy = "List the live instances with `kvxfer instances`."
    members = ("instance_id",)


class StaleEpoch(ControlPlaneError):
    """The instance's lease has expired, or a newer process has its id."""

    code = "stale-epoch"
    status = 409
    remedy = "Register again; a worker does so by itself."
    members = ("instance_id", "epoch")


class NotAggregating(ControlPlaneError):
    """No instance of the model serves requests alone, and no pair can serve this request."""

    code = "not-aggregating"
    status = router_status = 501
    remedy = "Leave out the named member, or add an instance of vLLM."
    members = ("param",)


class NoCapacity(ControlPlaneError):
    """No ready prefill/decode pair can take the request now. `reasons` says why each instance is
    excluded."""

    code = "no-capacity"
    status = router_status = 503
    remedy = "Retry, or add what the reasons name."
    members = ("reasons", "retry_after_seconds")


class UnknownTransfer(ControlPlaneError):
    """The transfer was released, has expired, or lost one of its instances."""

    code = "unknown-transfer"
    status = 404
    remedy = "Open a new transfer."
    members = ("transfer_id",)


class UnknownBlockTable(ControlPlaneError):
    """The transfer is open (brokered handshake), and decode has not sent its block table yet."""

    code = "unknown-block-table"
    status = 404
    remedy = "Ask again with `wait_seconds`."
    members = ("transfer_id",)


class UnknownTrace(ControlPlaneError):
    """The control plane has no spans of the request: not recorded, not yet arrived, at another
    replica, too old, or lost at a restart."""

    code = "unknown-trace"
    status = 404
    remedy = "See docs/observe.md#traces for the requests that are recorded."
    members = ("request_id",)


class TransferExists(ControlPlaneError):
    """Another request has opened a transfer under this id."""

    code = "transfer-exists"
    status = 409
    remedy = "Take a new id; only a repeated request keeps it."
    members = ("transfer_id",)


class BlockTableExists(ControlPlaneError):
    """The transfer already has another block table."""

    code = "block-table-exists"
    status = 409
    remedy = "Open a new transfer."
    members = ("transfer_id",)


class BlockTableMismatch(ControlPlaneError):
    """The block table is of another transfer, pair or epoch than the one it was sent for."""

    code = "block-table-mismatch"
    status = 409
    remedy = "Open a new transfer."
    members = ("transfer_id",)


class UnknownWeightUpdate(ControlPlaneError):
    """The update was not announced here, ended long ago, or a restart with `--registry embedded`
    forgot it."""

    code = "unknown-weight-update"
    status = 404
    remedy = "Announce the update again."
    members = ("update_id",)


class WeightUpdateExists(ControlPlaneError):
    """Another update of the model is under way, or another update has this id."""

    code = "weight-update-exists"
    status = 409
    remedy = "Wait until it ends, or abort it."
    members = ("update_id", "model", "version")


class OldVersion(ControlPlaneError):
    """The version of an update is not greater than one that an instance serves."""

    code = "old-version"
    status = 409
    remedy = "Announce a version greater than `served`."
    members = ("instance_id", "served", "version")


class WeightUpdateDecided(ControlPlaneError):
    """The weight update already has the opposite decision."""

    code = "weight-update-decided"
    status = 409
    remedy = "Follow that decision."
    members = ("decision", "update_id", "model", "version")


class Unauthenticated(ControlPlaneError):
    """The request carries no bearer token, or one that the control plane does not know
    (`invalid_token`)."""

    code = "unauthenticated"
    status = 401
    remedy = "Set KVXFER_TOKEN_FILE; check the control plane's tokens file."
    members = ("invalid_token",)


class Forbidden(ControlPlaneError):
    """The token has none of the `scopes` that the route requires, or the call acts as the instance
    `instance_id` without its secret."""

    code = "forbidden"
    status = 403
    remedy = "Use a token with such a scope; run `kvxfer drain` beside the worker and as its user."
    members = ("scopes", "instance_id")


class RateLimited(ControlPlaneError):
    """One token sends too many requests from one address. `retry_after_seconds` is Retry-After, but
    exact."""

    code = "rate-limited"
    status = 429
    router_status = 503
    remedy = "Retry after that time; `--rate-limit` sets the limit."
    members = ("retry_after_seconds",)


class BodyTooLarge(ControlPlaneError):
    """The body of the request exceeds `--max-body-bytes`."""

    code = "body-too-large"
    status = router_status = 413
    remedy = "Send less, or raise the limit."


class UntrustedCertificate(ControlPlaneError):
    """TLS failed: the client does not trust the CA of the control plane's certificate, it is for
    another name, or the control plane does not accept the client's."""

    code = "untrusted-certificate"
    remedy = (
        "Set KVXFER_CA_FILE and, for a client certificate, KVXFER_CERT_FILE and KVXFER_KEY_FILE."
    )


class ScorerFailed(KvxferError):
    """Another package's scorer failed, or returned no finite number by which pairs can be
    compared."""

    code = "scorer-failed"
    status = 500
    remedy = "Correct the scorer, or name another one in `--pairing-policy`."


class ScalingFailed(KvxferError):
    """A scaling decision could not be carried out. The next round retries."""

    code = "scaling-failed"
    status = 502
    remedy = "Grant the right that the message names."


class NotLeader(KvxferError):
    """Another control-plane replica now leads the autoscaling; nothing was written."""

    code = "not-leader"
    remedy = "Nothing has to be done."


# --- router ----------------------------------------------------------------------------------


class UnknownModel(KvxferError):
    """There are instances, but none serves the model that the request names."""

    code = "unknown-model"
    router_status = 404
    remedy = "Name a model of `GET /v1/models`."
    members = ("param",)


class InvalidApiKey(KvxferError):
    """The request has no API key, or one that the router does not know."""

    code = "invalid-api-key"
    router_status = 401
    remedy = "Send a key of `--api-keys-file` as `Authorization: Bearer KEY`."


class TooManyWrongKeys(KvxferError):
    """An address sends more than 5 unknown API keys per second, or more than 50 at once."""

    code = "too-many-wrong-keys"
    router_status = 429
    remedy = "Retry after Retry-After, with a key that the router knows."
    members = ("retry_after_seconds",)


class Overloaded(KvxferError):
    """The router's limit of requests, or of the bytes of their bodies, is reached."""

    code = "overloaded"
    router_status = 503
    remedy = "Retry later, or raise `--max-requests` or `--max-held-bytes`."


class WorkerError(KvxferError):
    """A worker answered with an error, and the client gets that answer."""

    code = "worker-error"
    remedy = "See the worker's message."

    def __init__(
        self,
        message: str,
        /,
        status: int = 502,
        content: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = self.router_status = status
        self.content, self.headers = content, headers


class WorkerKeyRefused(KvxferError):
    """A worker refuses the key that the router sends, or requires one."""

    code = "worker-key-refused"
    remedy = "Write the key that the workers require into `--worker-key-file`."


# --- benchmarks ------------------------------------------------------------------------------


class BenchError(KvxferError):
    """A benchmark could not be carried out."""

    code = "bench-failed"
    remedy = "See the message, and the output of the other host."


class WrongBytes(BenchError):
    """A destination pool does not hold what was sent."""

    code = "wrong-bytes"
    remedy = "Check memory, NICs and drivers on both hosts."


class NotAvailableHere(BenchError):
    """A case needs what this host does not permit; the other cases are measured."""

    code = "not-available-here"
    remedy = "Grant what the message names, if the case is wanted."


def every(root: type[KvxferError] = KvxferError) -> Iterator[type[KvxferError]]:
    """Yields `root` and all classes of this module below it, in its order."""
    pending = [root]
    while pending:
        yield (kind := pending.pop())
        below = [each for each in kind.__subclasses__() if each.__module__ == __name__]
        pending.extend(reversed(below))


def by_code(code: str) -> type[KvxferError]:
    """Returns the error class of a code; `KvxferError` if the code is unknown."""
    return next((kind for kind in every() if kind.code == code), KvxferError)


def without_traceback(error: _Error) -> _Error:
    """Returns the same error without a traceback, for an error that is kept or raised again. A
    traceback keeps alive the frames that the error passed, with their local variables."""
    again = type(error).__new__(type(error), *error.args)
    again.args = error.args  # an OSError sets them in __init__
    again.__dict__.update(error.__dict__)
    return again
