"""The handshake of two instances: whether they can transfer, and what would move."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.errors import InvalidArgument
from kvxfer.instances import Instance, Role
from kvxfer.kv.plan import LayerPlan, TransferPlan, plan_transfer
from kvxfer.kv.ranks import bytes_per_token, layers_between, sources
from kvxfer.layout import KvLayout
from kvxfer.scheduler.pairing import check_pair, common_fabrics
from kvxfer.scheduler.registry import Registry
from kvxfer.transfers import (
    Handshake,
    Party,
    PlannedCopy,
    PlannedLayer,
    PlanSummary,
    RankPair,
)


async def shake_hands(registry: Registry, prefill_id: str, decode_id: str) -> Handshake:
    """Returns the plan of a pair and the addresses of both. Reserves nothing.

    The instances may be in any state. Raises UnknownInstance, LayoutMismatch that names the field,
    and InvalidArgument if an instance does not take that role or both are the same.
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
        rank_pairs=tuple(_rank_pairs(prefill.layout, decode.layout)),
    )


def _require_role(instance: Instance, side: Role) -> Instance:
    if not instance.role.serves(side):
        raise InvalidArgument(
            f"{side}_id names instance {instance.instance_id!r}, whose role is {instance.role}; "
            f"name one whose role is {side} or both"
        )
    return instance


def _rank_pairs(prefill: KvLayout, decode: KvLayout) -> Iterator[RankPair]:
    for rank in range(decode.num_ranks):
        theirs = decode.of_rank(rank)
        for source in sources(prefill, theirs):
            ours = prefill.of_rank(source)
            yield RankPair(
                prefill_rank=source,
                decode_rank=rank,
                layers=len(layers_between(ours, theirs)),
                bytes_per_token=bytes_per_token(ours, theirs),
            )


def _summary(plan: TransferPlan) -> PlanSummary:
    return PlanSummary(
        prefill_rank=plan.prefill.rank,
        decode_rank=plan.decode.rank,
        layers=len(plan.layers),
        cycle_tokens=plan.cycle_tokens,
        runs_per_cycle=plan.runs_per_cycle,
        bytes_per_cycle=plan.bytes_per_cycle,
        prefill_block_size=plan.prefill.block_size,
        decode_block_size=plan.decode.block_size,
        permutes=plan.permutes,
        layer_map=tuple(
            PlannedLayer(
                prefill_layer=layer.src_layer,
                decode_layer=layer.dst_layer,
                copies=tuple(_by_parts(layer)),
            )
            for layer in plan.layers
        ),
    )


def _by_parts(layer: LayerPlan) -> Iterator[PlannedCopy]:
    """Yields one copy for all copies between the same two parts."""
    for src_part, dst_part in dict.fromkeys((c.src_part, c.dst_part) for c in layer.copies):
        between = [c for c in layer.copies if (c.src_part, c.dst_part) == (src_part, dst_part)]
        yield PlannedCopy(
            prefill_part=src_part,
            decode_part=dst_part,
            runs=sum(copy.count for copy in between),
            bytes=sum(copy.length * copy.count for copy in between),
        )
