"""Every request that the control plane takes, as a description: what to send, what comes back.

Nothing here does I/O. `ControlPlaneClient` and `SyncControlPlaneClient` have one method for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from kvxfer.instances import (
    BlockUpdate,
    Instance,
    InstanceList,
    InstanceSpec,
    InstanceState,
    Lease,
    Load,
    PublishedBlocks,
    Registered,
    Role,
)
from kvxfer.kv.block_table import BlockTable
from kvxfer.overview import Overview, OverviewQuery
from kvxfer.prefix_hashes import as_text
from kvxfer.record import lenient
from kvxfer.scaling import ScalePlan
from kvxfer.traces import Trace
from kvxfer.transfers import Handshake, OpenedTransfer, Transfer, TransferList
from kvxfer.weight_updates import (
    AnnounceUpdate,
    Decided,
    Decision,
    ReportUpdate,
    WeightUpdate,
    WeightUpdateList,
)

_UPDATES: Final = "/v1/weights/updates"

T = TypeVar("T")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `read` makes a value of the answer's content, or raises UNREADABLE."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    """Whether it may be sent again if it is not known to have been carried out."""
    wait_seconds: float = 0.0
    """Seconds that the control plane may take to answer, in addition to the timeout."""
    deadline: float | None = None
    """Seconds for all attempts together; None uses the client's own."""
    paged: bool = False
    """Whether the answer, a tuple, may come in pages. Each page has the whole deadline."""
    known: tuple[str, T] | None = None
    """ETag and value of an earlier answer, which is not sent again if it still holds."""
    secret: str | None = field(default=None, repr=False)
    """The secret of the instance that the call acts as."""

    def within(self, seconds: float) -> Call[T]:
        """Returns the same call with another deadline."""
        return replace(self, deadline=seconds)


# --- instances -------------------------------------------------------------------------------


def register(
    spec: InstanceSpec,
    *,
    state: InstanceState = InstanceState.JOINING,
    incarnation: str = "",
    takes_secret: bool = False,
) -> Call[Registered]:
    """Begins a lease; `Registration` does this and keeps it. Raises InstanceExists.

    With `takes_secret` the answer has a secret that calls as this instance send.
    """
    body = {**msgspec.to_builtins(spec), "state": state.value, "incarnation": incarnation}
    if takes_secret:
        body["takes_secret"] = True
    # Without an incarnation, a repeated call could be another process's.
    return Call("POST", "/v1/instances", _reads(Registered), body, repeatable=bool(incarnation))


def heartbeat(
    instance_id: str,
    epoch: int,
    *,
    state: InstanceState | None = None,
    load: Load | None = None,
    secret: str | None = None,
) -> Call[Lease]:
    """Renews a lease. None leaves a value as it was. Raises StaleEpoch, or Forbidden."""
    body: dict[str, Any] = {"epoch": epoch}
    if state is not None:
        body["state"] = state.value
    if load is not None:
        body["load"] = msgspec.to_builtins(load)
    path = f"{_instance(instance_id)}/heartbeat"
    return Call("PUT", path, _reads(Lease), body, secret=secret)


def publish_blocks(
    instance_id: str, epoch: int, update: BlockUpdate, *, secret: str | None = None
) -> Call[PublishedBlocks]:
    """Reports which KV blocks an instance has cached. Raises StaleEpoch, or Forbidden."""
    body = {
        "epoch": epoch,
        "added": as_text(update.added),
        "removed": as_text(update.removed),
        "reset": update.reset,
    }
    path = f"{_instance(instance_id)}/blocks"
    return Call("POST", path, _reads(PublishedBlocks), body, secret=secret)


def deregister(instance_id: str, epoch: int, *, secret: str | None = None) -> Call[None]:
    """Ends a lease. Raises UnknownInstance, StaleEpoch, or Forbidden."""
    params = {"epoch": epoch}
    return Call("DELETE", _instance(instance_id), _nothing, params=params, secret=secret)


def instances(
    *,
    role: Role | None = None,
    model: str | None = None,
    state: InstanceState | None = None,
) -> Call[tuple[Instance, ...]]:
    """Lists the live instances that match, ordered by id."""
    params = _given(role=role, model=model, state=state)
    read = _reads(InstanceList)
    return Call("GET", "/v1/instances", lambda c: read(c).instances, params=params, paged=True)


def instance(instance_id: str) -> Call[Instance]:
    """Returns one instance. Raises UnknownInstance."""
    return Call("GET", _instance(instance_id), _reads(Instance))


def drain(
    instance_id: str, *, deadline_seconds: float = 60.0, secret: str | None = None
) -> Call[Instance]:
    """Lets an instance finish its work and leave. Raises UnknownInstance, or Forbidden."""
    body = {"deadline_seconds": deadline_seconds}
    path = f"{_instance(instance_id)}/drain"
    return Call("POST", path, _reads(Instance), body, secret=secret)


def undrain(instance_id: str) -> Call[Instance]:
    """Cancels a drain; the instance is ready at its worker's next heartbeat. Raises
    UnknownInstance, or InstanceLeaving if the worker has begun to leave."""
    return Call("DELETE", f"{_instance(instance_id)}/drain", _reads(Instance))


def change_role(instance_id: str, role: Role) -> Call[Instance]:
    """Changes the role of an instance without a restart. Raises UnknownInstance."""
    return Call("POST", f"{_instance(instance_id)}/role", _reads(Instance), {"role": role.value})


# --- transfers -------------------------------------------------------------------------------


def shake_hands(prefill_id: str, decode_id: str) -> Call[Handshake]:
    """Returns what a transfer between two instances would move. Raises UnknownInstance or
    LayoutMismatch."""
    body = {"prefill_id": prefill_id, "decode_id": decode_id}
    return Call("POST", "/v1/handshakes", _reads(Handshake), body)


def open_transfer(
    *,
    transfer_id: str | None = None,
    request_id: str | None = None,
    model: str | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    avoid: Collection[str] = (),
    prefix_hashes: Sequence[int] = (),
    tokens_per_hash: int | None = None,
    explain: bool = False,
    weights_version: int | None = None,
    aggregated: bool = False,
    or_aggregated: bool = False,
    wait_seconds: float = 0.0,
    waited_seconds: float = 0.0,
    priority: int = 0,
    tenant: str | None = None,
) -> Call[OpenedTransfer]:
    """Reserves the best pair, each argument as in `TransferRequest`.

    If no answer arrives, it is asked for again only if `transfer_id` names it.

    Raises NoCapacity, whose `details["reasons"]` say what is missing, PromptTooLong,
    NotAggregating, and TransferExists.
    """
    body: dict[str, Any] = {
        "request_id": request_id,
        "model": model,
        "prompt_tokens": prompt_tokens,
        "prefix_hashes": as_text(prefix_hashes),
        "tokens_per_hash": tokens_per_hash,
        "explain": explain,
    }
    # Left out at their defaults: a control plane of an earlier version does not know them.
    if transfer_id is not None:
        body["transfer_id"] = transfer_id
    if output_tokens is not None:
        body["output_tokens"] = output_tokens
    if avoid:
        body["avoid"] = list(avoid)
    if weights_version is not None:
        body["weights_version"] = weights_version
    if aggregated:
        body["aggregated"] = True
    if or_aggregated:
        body["or_aggregated"] = True
    if wait_seconds:
        body.update(wait_seconds=wait_seconds, priority=priority, tenant=tenant)
        if waited_seconds:
            body["waited_seconds"] = waited_seconds
    return Call(
        "POST",
        "/v1/transfers",
        _reads(OpenedTransfer),
        body,
        repeatable=transfer_id is not None,
        wait_seconds=wait_seconds,
    )


def transfers(
    *, instance_id: str | None = None, limit: int | None = None
) -> Call[tuple[Transfer, ...]]:
    """Lists the open transfers, of one instance or of all, the oldest first, at most `limit`."""
    params = _given(instance_id=instance_id, limit=limit)
    read = _reads(TransferList)
    paged = limit is None
    return Call("GET", "/v1/transfers", lambda c: read(c).transfers, params=params, paged=paged)


def transfer(transfer_id: str) -> Call[Transfer]:
    """Returns one transfer. Raises UnknownTransfer if it is not open."""
    return Call("GET", f"/v1/transfers/{quote(transfer_id, safe='')}", _reads(Transfer))


def release_transfer(transfer_id: str) -> Call[None]:
    """Releases a reservation. Raises UnknownTransfer."""
    return Call("DELETE", f"/v1/transfers/{quote(transfer_id, safe='')}", _nothing)


def put_block_table(table: BlockTable, *, deadline: float | None = None) -> Call[None]:
    """Stores decode's block table for prefill to fetch; a repeated call changes nothing.

    Raises UnknownTransfer, TicketInvalid, BlockTableMismatch or BlockTableExists.
    """
    path, body = _block_table(table.offer.transfer_id), msgspec.to_builtins(table)
    return Call("POST", path, _nothing, body, deadline=deadline)


def block_table(
    transfer_id: str, *, wait_seconds: float = 0.0, deadline: float | None = None
) -> Call[BlockTable]:
    """Returns the block table of a transfer. The control plane waits for it at most `wait_seconds`
    (up to 30).

    Raises UnknownTransfer, also when the transfer ends meanwhile, and UnknownBlockTable.
    """
    params = {"wait_seconds": wait_seconds}
    return Call(
        "GET",
        _block_table(transfer_id),
        _reads(BlockTable),
        params=params,
        wait_seconds=wait_seconds,
        deadline=deadline,
    )


# --- weight updates --------------------------------------------------------------------------


def announce_weight_update(request: AnnounceUpdate) -> Call[WeightUpdate]:
    """Begins an update of a model's weights; `WeightUpdateReport` does this and keeps it.

    Raises WeightUpdateExists, OldVersion, UnknownInstance or InvalidArgument.
    """
    body = msgspec.to_builtins(request)
    # Without an id, a repeated call would announce another update.
    again = request.update_id is not None
    return Call("POST", _UPDATES, _reads(WeightUpdate), body, repeatable=again)


def weight_updates(*, model: str | None = None) -> Call[tuple[WeightUpdate, ...]]:
    """Lists the updates under way and the last ones that ended, the newest first."""
    read, params = _reads(WeightUpdateList), _given(model=model)
    return Call("GET", _UPDATES, lambda c: read(c).updates, params=params)


def weight_update(update_id: str) -> Call[WeightUpdate]:
    """Returns one update. Raises UnknownWeightUpdate."""
    return Call("GET", _update(update_id), _reads(WeightUpdate))


def report_weight_update(update_id: str, report: ReportUpdate) -> Call[WeightUpdate]:
    """Renews the lease of an update and reports news. Raises UnknownWeightUpdate, or
    WeightUpdateDecided if it did not end as the report says."""
    body = msgspec.to_builtins(report)
    return Call("PATCH", _update(update_id), _reads(WeightUpdate), body)


def decide_weight_update(
    update_id: str,
    decision: Decision,
    *,
    instance_id: str | None = None,
    secret: str | None = None,
) -> Call[Decided]:
    """Decides whether all instances apply an update; the first decision holds, and is the answer.
    An instance that takes part names itself. Raises UnknownWeightUpdate, or Forbidden."""
    path, body = f"{_update(update_id)}/decision", {"decision": decision.value}
    params = _given(instance_id=instance_id)
    return Call("POST", path, _reads(Decided), body, params=params, secret=secret)


# --- scaling ---------------------------------------------------------------------------------


def scale_plan() -> Call[ScalePlan]:
    """Returns what the autoscaler would do now. Raises ScalingFailed if its backend is not
    available."""
    return Call("GET", "/v1/scale/plan", _reads(ScalePlan))


# --- the fleet as a whole ---------------------------------------------------------------------


def overview(query: OverviewQuery | None = None) -> Call[Overview]:
    """Returns a bounded summary of the fleet, with the instances that `query` asks for."""
    asked = OverviewQuery() if query is None else query
    params = _given(**msgspec.to_builtins(asked))
    return Call("GET", "/v1/overview", _reads(Overview), params=params)


# --- traces ----------------------------------------------------------------------------------


def trace(request_id: str) -> Call[Trace]:
    """Returns the spans that were sent about a request, or about a trace. Raises UnknownTrace."""
    return Call("GET", f"/v1/traces/{quote(request_id, safe='')}", _reads(Trace))


# --- the control plane itself ----------------------------------------------------------------


def ready() -> Call[None]:
    """Returns if the control plane can serve; raises ControlPlaneUnavailable otherwise."""
    return Call("GET", "/readyz", _nothing)


def _reads(answer: type[A]) -> Callable[[bytes], A]:
    return lambda content: lenient(content, answer)


def _nothing(_content: bytes) -> None:
    return None


def _instance(instance_id: str) -> str:
    return f"/v1/instances/{quote(instance_id, safe='')}"


def _block_table(transfer_id: str) -> str:
    return f"/v1/transfers/{quote(transfer_id, safe='')}/block-table"


def _update(update_id: str) -> str:
    return f"{_UPDATES}/{quote(update_id, safe='')}"


def _given(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}
