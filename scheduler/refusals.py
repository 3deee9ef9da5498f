"""The errors of a registry that refuses a step, equal in every implementation. Documentation shows
them as examples (kvxfer.api.examples)."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.errors import (
    BlockTableExists,
    ControlPlaneUnavailable,
    Forbidden,
    InstanceExists,
    InstanceLeaving,
    NoCapacity,
    NotAggregating,
    OldVersion,
    PromptTooLong,
    StaleEpoch,
    TransferExists,
    UnknownBlockTable,
    UnknownInstance,
    UnknownTransfer,
    UnknownWeightUpdate,
    WeightUpdateDecided,
    WeightUpdateExists,
)
from kvxfer.instances import Instance
from kvxfer.transfers import Transfer, TransferRequest
from kvxfer.weight_updates import UpdatePart, WeightUpdate


def stopping() -> ControlPlaneUnavailable:
    return ControlPlaneUnavailable("the control plane is stopping; retry with another one")


def held(
    instance_id: str,
    http_address: str,
    epoch: int,
    lease_remaining_seconds: float,
    *,
    registering: str,
) -> InstanceExists:
    """Refuses an id that is held. `registering` is the HTTP address of the process that asks.

    A process that restarts at another address looks like a second one until the earlier lease ends.
    """
    until = f"when the earlier lease ends, in {lease_remaining_seconds:.1f} s without a heartbeat"
    if registering == http_address:
        said = (
            f"instance {instance_id!r} is alive at {http_address} (epoch {epoch}), and another "
            f"process with this instance_id and address registers; stop one of them. A process "
            f"that replaces another is accepted {until}"
        )
    else:
        said = (
            f"two instances have the instance_id {instance_id!r}: one is alive at {http_address} "
            f"(epoch {epoch}), the other registers from {registering}; leave instance_id out, or "
            "make it unique for each replica. An instance that replaces another is accepted "
            f"{until}"
        )
    return InstanceExists(
        said,
        instance_id=instance_id,
        epoch=epoch,
        lease_remaining_seconds=round(lease_remaining_seconds, 3),
    )


def stale_epoch(instance_id: str, epoch: int, living: int | None) -> StaleEpoch:
    """Refuses an epoch. `living` is the epoch of the id's lease, None if it has no lease."""
    if living is None:
        said = f"instance {instance_id!r} has no lease under epoch {epoch}; register again"
    else:
        said = f"instance {instance_id!r} lives under epoch {living}, not {epoch}; register again"
    return StaleEpoch(said, instance_id=instance_id, epoch=epoch)


def wrong_secret(instance_id: str, shown: str) -> Forbidden:
    said = "another one" if shown else "none"
    return Forbidden(
        f"a call that acts as instance {instance_id!r} needs the secret of its lease, and this one "
        f"shows {said}; show what the registration answered, run `kvxfer drain` where the worker "
        "runs and as its user, or drain it with a token of scope admin",
        instance_id=instance_id,
    )


def leaving(instance_id: str) -> InstanceLeaving:
    return InstanceLeaving(
        f"the worker of instance {instance_id!r} has begun to leave, so its drain cannot be "
        "undone; start it again when it has left",
        instance_id=instance_id,
    )


def not_ready(instance_id: str, state: str) -> NoCapacity:
    return NoCapacity(
        f"instance {instance_id!r} is {state}, not ready",
        reasons=[f"instance {instance_id!r} is {state}"],
    )


def too_few_blocks(instance_id: str, unreserved: int, wanted: int) -> NoCapacity:
    return NoCapacity(
        f"instance {instance_id!r} has {unreserved} unreserved KV blocks, not {wanted}",
        reasons=[f"instance {instance_id!r} has {unreserved} unreserved blocks"],
    )


def no_pair(reasons: Sequence[str]) -> NoCapacity:
    return NoCapacity(
        "no pair of instances can take the request now; retry, or add what the reasons name",
        reasons=list(reasons),
    )


def not_aggregating(of_model: str) -> NotAggregating:
    return NotAggregating(
        f"no instance{of_model} serves requests alone; send one that a pair can serve, or start "
        "an instance of vLLM"
    )


def prompt_too_long(
    request: TransferRequest, blocks: int, what: str, largest: Instance
) -> PromptTooLong:
    """Refuses a prompt that takes more `blocks` than the largest ready instance has."""
    return PromptTooLong(
        f"a prompt of {request.prompt_tokens} tokens takes {blocks} KV blocks, but the largest "
        f"ready {what}, {largest.instance_id!r}, has {largest.num_blocks}; shorten the prompt or "
        "give the instances more blocks"
    )


def unknown_instance(instance_id: str) -> UnknownInstance:
    return UnknownInstance(
        f"no instance {instance_id!r} is registered: it never was, it left, or its lease expired",
        instance_id=instance_id,
    )


def unknown_transfer(transfer_id: str) -> UnknownTransfer:
    return UnknownTransfer(
        f"no transfer {transfer_id!r} is open: it was released, it expired, or one of its "
        "instances is gone",
        transfer_id=transfer_id,
    )


def transfer_exists(opened: Transfer) -> TransferExists:
    return TransferExists(
        f"transfer {opened.transfer_id!r} is open for another request ({opened.request_id!r}, "
        f"{opened.prompt_tokens} prompt tokens of model {opened.model!r}); take a new transfer_id",
        transfer_id=opened.transfer_id,
    )


def unknown_block_table(transfer_id: str) -> UnknownBlockTable:
    return UnknownBlockTable(
        f"transfer {transfer_id!r} has no block table yet; ask again, with wait_seconds to be "
        "answered as soon as it has",
        transfer_id=transfer_id,
    )


def block_table_exists(transfer_id: str) -> BlockTableExists:
    return BlockTableExists(
        f"transfer {transfer_id!r} has another block table already; a transfer takes one, open a "
        "new one",
        transfer_id=transfer_id,
    )


def unknown_update(update_id: str) -> UnknownWeightUpdate:
    return UnknownWeightUpdate(
        f"no weight update {update_id!r} is known: it was not announced here, or it ended long ago",
        update_id=update_id,
    )


def update_id_taken(update: WeightUpdate) -> WeightUpdateExists:
    return WeightUpdateExists(
        f"weight update {update.update_id!r} is of model {update.model!r} to version "
        f"{update.version}, and is {update.state}; take a new update_id",
        **_about(update),
    )


def update_under_way(update: WeightUpdate) -> WeightUpdateExists:
    return WeightUpdateExists(
        f"update {update.update_id!r} of model {update.model!r} to version {update.version} is "
        f"{update.state}; wait for its end, or decide to abort it",
        **_about(update),
    )


def update_decided(update: WeightUpdate, told: str) -> WeightUpdateDecided:
    return WeightUpdateDecided(
        f"weight update {update.update_id!r} cannot be {told}: it was decided to "
        f"{update.decision} it",
        **_about(update),
        decision=update.decision,
    )


def old_version(model: str, version: int, newest: UpdatePart) -> OldVersion:
    return OldVersion(
        f"instance {newest.instance_id!r} of model {model!r} serves weights version "
        f"{newest.version}; announce a greater one than that, not {version}",
        instance_id=newest.instance_id,
        version=version,
        served=newest.version,
    )


def update_contended(update_id: str) -> ControlPlaneUnavailable:
    return ControlPlaneUnavailable(
        f"weight update {update_id!r} changes too fast to take a step of it; retry"
    )


def _about(update: WeightUpdate) -> dict[str, object]:
    return {"update_id": update.update_id, "model": update.model, "version": update.version}
