"""Whether two instances can transfer to each other, and what would move."""

from __future__ import annotations

from kvxfer.errors import InvalidArgument
from kvxfer.instances import Instance, Role
from kvxfer.kv.plan import TransferPlan, plan_transfer
from kvxfer.scheduler.pairing import check_pair, common_fabrics
from kvxfer.scheduler.registry import Registry
from kvxfer.transfers import Handshake, Party, PlannedCopy, PlannedLayer, PlanSummary


async def shake_hands(registry: Registry, prefill_id: str, decode_id: str) -> Handshake:
    """The plan of a pair and where both listen; in whatever state they are, nothing is reserved.

    Raises UnknownInstance, LayoutMismatch that names the field, and InvalidArgument where an
    instance does not take that role or both are the same.
    """
    if prefill_id == decode_id:
        raise InvalidArgument(
            f"prefill_id and decode_id are both {prefill_id!r}; a transfer takes two instances"
        )
    prefill = _require_role(await registry.instance(prefill_id), Role.PREFILL)
    decode = _require_role(await registry.instance(decode_id), Role.DECODE)
    check_pair(prefill, decode)
    return Handshake(
        prefill=Party.of(prefill),
        decode=Party.of(decode),
        fabrics=common_fabrics(prefill, decode),
        plan=_summary(plan_transfer(prefill.layout, decode.layout)),
    )


def _require_role(instance: Instance, side: Role) -> Instance:
    if not instance.role.serves(side):
        raise InvalidArgument(
            f"{side}_id names instance {instance.instance_id!r}, whose role is {instance.role}; "
            f"name one whose role is {side} or both"
        )
    return instance


def _summary(plan: TransferPlan) -> PlanSummary:
    return PlanSummary(
        layers=len(plan.layers),
        copies_per_block=sum(copy.count for layer in plan.layers for copy in layer.copies),
        bytes_per_block=plan.bytes_per_block,
        prefill_block_size=plan.prefill.block_size,
        decode_block_size=plan.decode.block_size,
        layer_map=tuple(
            PlannedLayer(
                prefill_layer=layer.src_layer,
                decode_layer=layer.dst_layer,
                copies=tuple(
                    PlannedCopy(
                        prefill_part=copy.src_part,
                        decode_part=copy.dst_part,
                        runs=copy.count,
                        bytes=copy.length * copy.count,
                    )
                    for copy in layer.copies
                ),
            )
            for layer in plan.layers
        ),
    )
