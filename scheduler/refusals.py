"""What a registry answers where it refuses a step; every implementation says the same."""

from __future__ import annotations

from kvxfer.errors import (
    BlockTableExists,
    ControlPlaneUnavailable,
    InstanceExists,
    NoCapacity,
    StaleEpoch,
    UnknownBlockTable,
    UnknownInstance,
    UnknownTransfer,
)


def stopping() -> ControlPlaneUnavailable:
    return ControlPlaneUnavailable("the control plane is stopping; retry with another one")


def held(
    instance_id: str, http_address: str, epoch: int, lease_remaining_seconds: float
) -> InstanceExists:
    return InstanceExists(
        f"instance {instance_id!r} is alive at {http_address} (epoch {epoch}); choose another "
        "instance_id, stop that instance, or wait until its lease ends, in "
        f"{lease_remaining_seconds:.1f} s without a heartbeat",
        instance_id=instance_id,
        epoch=epoch,
        lease_remaining_seconds=round(lease_remaining_seconds, 3),
    )


def stale_epoch(instance_id: str, epoch: int, living: int | None) -> StaleEpoch:
    """`living` is the epoch that the id lives under, None where it has no lease."""
    if living is None:
        said = f"instance {instance_id!r} has no lease under epoch {epoch}; register again"
    else:
        said = f"instance {instance_id!r} lives under epoch {living}, not {epoch}; register again"
    return StaleEpoch(said, instance_id=instance_id, epoch=epoch)


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
