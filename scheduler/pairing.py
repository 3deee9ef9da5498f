"""Which prefill and which decode instance serve a request: pure functions over the fleet."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final, TypeAlias

from kvxfer.errors import LayoutMismatch, NoCapacity, PromptTooLong
from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.kv.layout import KvLayout
from kvxfer.kv.plan import plan_transfer
from kvxfer.transfers import TransferRequest

_SIDES: Final = (Role.PREFILL, Role.DECODE)
_MISMATCHES_TOLD: Final = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """The choice, and the KV blocks that the request takes on each side."""

    prefill: Instance
    decode: Instance
    prefill_blocks: int
    decode_blocks: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What of an instance decides with whom it can exchange a KV cache."""

    model: str
    layout: KvLayout
    fabrics: frozenset[str]


# Per kind the two least loaded instances: the second one for the pair whose first ones are one
# and the same instance of role `both`.
_Candidates: TypeAlias = dict[_Kind, list[Instance]]


def choose_pair(instances: Iterable[Instance], request: TransferRequest) -> Pair:
    """The least loaded pair of two ready instances with one model and layouts that map.

    The load of a pair is the sum of what both have running, waiting and reserved; of equally
    loaded pairs the one with less of its KV cache in use, then the first by id. An instance takes
    part where the blocks of the prompt are neither reserved by others nor reported as used.

    Linear in the number of instances, as layouts are few. Raises PromptTooLong where the prompt
    fits into no cache at all, and NoCapacity with the `reasons` otherwise.
    """
    fleet = [
        i
        for i in instances
        if request.model in (None, i.model) and i.instance_id not in request.avoid
    ]
    ready = {
        side: [i for i in fleet if i.state is InstanceState.READY and i.role.serves(side)]
        for side in _SIDES
    }
    fitting = {side: [i for i in ready[side] if _fits(i, request)] for side in _SIDES}
    prefill, decode = (_least_loaded(fitting[side]) for side in _SIDES)

    best: tuple[Instance, Instance] | None = None
    mismatches: list[str] = []
    for (ours, prefills), (theirs, decodes) in product(prefill.items(), decode.items()):
        mismatch = _mismatch(ours, theirs)
        if mismatch is not None:
            mismatches.append(
                f"prefill {prefills[0].instance_id!r} and decode {decodes[0].instance_id!r} "
                f"do not match: {mismatch}"
            )
            continue
        pairs = [p for p in product(prefills, decodes) if p[0].instance_id != p[1].instance_id]
        best = min([*pairs, *([best] if best else [])], key=_pair_load, default=None)

    if best is not None:
        return Pair(
            prefill=best[0],
            decode=best[1],
            prefill_blocks=blocks_for(best[0], request),
            decode_blocks=blocks_for(best[1], request),
        )
    for side in _SIDES:
        _require_that_prompt_can_fit(ready[side], side, request)
    raise NoCapacity(
        "no pair of instances can take the request now; retry, or add what the reasons name",
        reasons=_reasons(fleet, ready, fitting, mismatches, request),
    )


def check_pair(prefill: Instance, decode: Instance) -> None:
    """Raises LayoutMismatch that names the first thing the two do not have in common."""
    mismatch = _compare(_kind(prefill), _kind(decode))
    if mismatch is not None:
        raise mismatch


def common_fabrics(prefill: Instance, decode: Instance) -> tuple[str, ...]:
    """The fabrics of both, in the order that prefill prefers."""
    return tuple(fabric for fabric in prefill.fabrics if fabric in decode.fabrics)


def blocks_for(instance: Instance, request: TransferRequest) -> int:
    """KV blocks that the prompt takes on the instance; 0 where its length is not known."""
    return instance.layout.blocks_for(request.prompt_tokens or 0)


def available_blocks(instance: Instance) -> int:
    """Blocks that a new transfer may count on.

    A block that is reserved may already be in use too, so the two are not added up.
    """
    unreserved = instance.num_blocks - instance.reserved.blocks
    free = instance.load.free_blocks
    return unreserved if free is None else min(unreserved, free)


def _fits(instance: Instance, request: TransferRequest) -> bool:
    return blocks_for(instance, request) <= available_blocks(instance)


def _kind(instance: Instance) -> _Kind:
    return _Kind(instance.model, instance.layout, frozenset(instance.fabrics))


def _compare(prefill: _Kind, decode: _Kind) -> LayoutMismatch | None:
    if prefill.model != decode.model:
        return LayoutMismatch("model", prefill.model, decode.model)
    if not prefill.fabrics & decode.fabrics:
        return LayoutMismatch("fabrics", sorted(prefill.fabrics), sorted(decode.fabrics))
    try:
        plan_transfer(prefill.layout, decode.layout)
    except LayoutMismatch as mismatch:
        return mismatch
    return None


@lru_cache(maxsize=4096)
def _mismatch(prefill: _Kind, decode: _Kind) -> str | None:
    mismatch = _compare(prefill, decode)
    if mismatch is None:
        return None
    return f"{mismatch.field} is {mismatch.prefill!r} and {mismatch.decode!r}"


def _instance_load(instance: Instance) -> tuple[int, float, str]:
    requests = instance.load.running + instance.load.waiting + instance.reserved.transfers
    return requests, 1 - available_blocks(instance) / instance.num_blocks, instance.instance_id


def _pair_load(pair: tuple[Instance, Instance]) -> tuple[int, float, str, str]:
    (requests, used, prefill), (more_requests, more_used, decode) = map(_instance_load, pair)
    return requests + more_requests, used + more_used, prefill, decode


def _least_loaded(instances: Iterable[Instance]) -> _Candidates:
    kinds: dict[_Kind, list[Instance]] = {}
    for instance in instances:
        kinds.setdefault(_kind(instance), []).append(instance)
    return {kind: heapq.nsmallest(2, same, key=_instance_load) for kind, same in kinds.items()}


def _require_that_prompt_can_fit(
    ready: Sequence[Instance], side: Role, request: TransferRequest
) -> None:
    if not ready or any(blocks_for(i, request) <= i.num_blocks for i in ready):
        return
    largest = max(ready, key=lambda i: i.num_blocks * i.layout.block_size)
    raise PromptTooLong(
        f"a prompt of {request.prompt_tokens} tokens takes {blocks_for(largest, request)} KV "
        f"blocks, but the largest ready {side} instance, {largest.instance_id!r}, has "
        f"{largest.num_blocks}; shorten the prompt or give the instances more blocks"
    )


def _reasons(
    fleet: Sequence[Instance],
    ready: dict[Role, list[Instance]],
    fitting: dict[Role, list[Instance]],
    mismatches: Sequence[str],
    request: TransferRequest,
) -> list[str]:
    of_model = "" if request.model is None else f" of model {request.model!r}"
    if not fleet:
        beside = f" beside {', '.join(request.avoid)}" if request.avoid else ""
        return [f"no instance{of_model} is registered{beside}"]
    reasons = []
    for side in _SIDES:
        if not ready[side]:
            states = Counter(i.state.value for i in fleet if i.role.serves(side))
            others = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            reasons.append(f"no {side} instance{of_model} is ready ({others or 'none registered'})")
        elif not fitting[side]:
            most = max(ready[side], key=available_blocks)
            reasons.append(
                f"no {side} instance{of_model} has the {blocks_for(most, request)} KV blocks free "
                f"(most: {most.instance_id!r} with {available_blocks(most)})"
            )
    if reasons:
        return reasons
    if mismatches:
        more = len(mismatches) - _MISMATCHES_TOLD
        told = list(mismatches[:_MISMATCHES_TOLD])
        return [*told, f"and {more} more like this"] if more > 0 else told
    return [f"only one instance{of_model} is ready, and a transfer takes two"]
