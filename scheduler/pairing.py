"""Which prefill and which decode instance serve a request: pure functions over the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from kvxfer.errors import LayoutMismatch, NoCapacity, NotAggregating, PromptTooLong
from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.kv.ranks import require_mappable, sources, targets
from kvxfer.kv_versions import UNTOLD, Versions, require_common_version
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity, require_same_model
from kvxfer.scheduler.scoring import available_blocks, occupancy
from kvxfer.transfers import Score, TransferRequest

SIDES: Final = (Role.PREFILL, Role.DECODE)
_MISMATCHES_TOLD: Final = 3
_OF_RANKS: Final = ("tp_size", "tp_rank", "pp_size", "pp_rank")


@dataclass(frozen=True, slots=True)
class Pair:
    """The choice, and the KV blocks that the request takes on each side."""

    prefill: Instance
    decode: Instance
    prefill_blocks: int
    decode_blocks: int
    score: Score | None = None
    """Why this pair, where the request asked for it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What of an instance decides with whom it can exchange a KV cache."""

    model: str
    layout: KvLayout
    fabrics: tuple[str, ...]
    whole: bool = True
    """Whether all ranks are registered, and not `layout`'s alone."""
    identity: ModelIdentity | None = None
    kv_versions: Versions = UNTOLD
    names: tuple[str, ...] = ()
    """Of aliases and adapters that requests may ask for beside the model."""
    aggregates: bool = False
    """Whether it serves requests alone."""

    def serves(self, request: TransferRequest) -> bool:
        """Whether it is of the model and the weights version that the request asks for."""
        version, model = request.weights_version, request.model
        if version is not None and (
            self.identity is None or self.identity.weights_version != version
        ):
            return False
        return model is None or model == self.model or model in self.names


def kind_of(instance: Instance) -> Kind:
    layout = instance.layout
    whole = len(instance.rank_addresses) == layout.num_ranks or layout.num_ranks == 1
    return Kind(
        instance.model,
        layout,
        instance.fabrics,
        whole,
        instance.identity,
        instance.kv_versions,
        instance.load.models,
        instance.aggregates,
    )


def fabric_steps(prefill: Kind, decode: Kind) -> int:
    """How many fabrics prefill would rather use than the best one that both have.

    `local` does not count: whether it can be used is a matter of the host, which distance covers.
    """
    preferred = [fabric for fabric in prefill.fabrics if fabric != "local"]
    return next((i for i, fabric in enumerate(preferred) if fabric in decode.fabrics), 0)


def check_pair(prefill: Instance, decode: Instance) -> None:
    """Raises LayoutMismatch that names the first thing the two do not have in common."""
    mismatch = _compare(kind_of(prefill), kind_of(decode))
    if mismatch is not None:
        raise mismatch


def common_fabrics(prefill: Instance, decode: Instance) -> tuple[str, ...]:
    """The fabrics that the two can use with each other, in the order that prefill prefers.

    `local` is left out where both name their hosts and these differ, unless nothing else is left.
    """
    common = tuple(fabric for fabric in prefill.fabrics if fabric in decode.fabrics)
    hosts = {prefill.labels.get("host"), decode.labels.get("host")} - {None}
    if len(hosts) > 1:
        return tuple(fabric for fabric in common if fabric != "local") or common
    return common


def blocks_for(instance: Instance, request: TransferRequest) -> int:
    """KV blocks that the prompt takes on the instance; 0 where its length is not known."""
    return instance.layout.blocks_for(request.prompt_tokens or 0)


def fits(instance: Instance, request: TransferRequest) -> bool:
    """Whether the blocks of the prompt are neither reserved by others nor reported as used."""
    return blocks_for(instance, request) <= available_blocks(instance)


@lru_cache(maxsize=4096)
def mismatch_of(prefill: Kind, decode: Kind) -> str | None:
    """What keeps the two kinds from exchanging a KV cache, in words; None where nothing does."""
    mismatch = _compare(prefill, decode)
    if mismatch is None:
        return None
    return f"{mismatch.field} is {mismatch.prefill!r} and {mismatch.decode!r}"


def refusal(
    instances: Iterable[Instance], request: TransferRequest
) -> NoCapacity | PromptTooLong | NotAggregating:
    """Why no pair of these instances can take the request. Linear in their number."""
    of_model = [i for i in instances if i.serves(request.model)]
    if request.aggregated and of_model:
        of_model = [i for i in of_model if i.aggregates]
        if not of_model:
            return NotAggregating(
                f"no instance{_of(request.model)} serves requests alone; send one that a pair can "
                "serve, or start an instance of vLLM"
            )
    version = request.weights_version
    fleet = [i for i in of_model if version in (None, i.weights_version)]
    if of_model and not fleet:
        return NoCapacity(
            f"no instance serves weights version {version} now; retry, or ask for another one",
            reasons=[_versions_there(of_model, request)],
        )
    ready = {
        side: [i for i in fleet if i.state is InstanceState.READY and i.role.serves(side)]
        for side in SIDES
    }
    if request.aggregated:
        return _no_single(fleet, [*ready[Role.PREFILL], *ready[Role.DECODE]], request)
    for side in SIDES:
        too_long = _prompt_too_long(ready[side], side, request)
        if too_long is not None:
            return too_long
    return NoCapacity(
        "no pair of instances can take the request now; retry, or add what the reasons name",
        reasons=_reasons(fleet, ready, request),
    )


def _no_single(
    fleet: Sequence[Instance], ready: Sequence[Instance], request: TransferRequest
) -> NoCapacity | PromptTooLong:
    """Why none of the instances that could serve the request alone can now."""
    if (too_long := _prompt_too_long(ready, "", request)) is not None:
        return too_long
    of_model = _of(request.model)
    if not fleet:
        reason = f"no instance{of_model} is registered"
    elif not ready:
        reason = f"no instance{of_model} is ready ({_states(fleet)})"
    else:
        reason = _too_few_blocks(ready, f"instance{of_model}", request)
    return NoCapacity("no instance can serve the request alone now; retry", reasons=[reason])


def _compare(prefill: Kind, decode: Kind) -> LayoutMismatch | None:
    if prefill.model != decode.model:
        return LayoutMismatch("model", prefill.model, decode.model)
    if not set(prefill.fabrics) & set(decode.fabrics):
        return LayoutMismatch("fabrics", sorted(prefill.fabrics), sorted(decode.fabrics))
    ours, theirs = prefill.layout, decode.layout
    try:
        require_common_version(prefill.kv_versions, decode.kv_versions)
        require_same_model(prefill.identity, decode.identity)
        require_mappable(ours, theirs)
    except LayoutMismatch as mismatch:
        return mismatch
    if prefill.whole and decode.whole:
        return None
    # A rank that is registered alone takes only a rank that needs no other.
    if sources(ours, theirs) == (ours.rank,) and targets(ours, theirs) == (theirs.rank,):
        return None
    field = next(name for name in _OF_RANKS if getattr(ours, name) != getattr(theirs, name))
    return LayoutMismatch(field, getattr(ours, field), getattr(theirs, field))


def _prompt_too_long(
    ready: Sequence[Instance], side: Role | Literal[""], request: TransferRequest
) -> PromptTooLong | None:
    if not ready or any(blocks_for(i, request) <= i.num_blocks for i in ready):
        return None
    largest = _first(ready, lambda i: i.num_blocks * i.layout.block_size)
    return PromptTooLong(
        f"a prompt of {request.prompt_tokens} tokens takes {blocks_for(largest, request)} KV "
        f"blocks, but the largest ready {f'{side} instance'.strip()}, {largest.instance_id!r}, has "
        f"{largest.num_blocks}; shorten the prompt or give the instances more blocks"
    )


def _reasons(
    fleet: Sequence[Instance], ready: dict[Role, list[Instance]], request: TransferRequest
) -> list[str]:
    of_model = _of(request.model)
    if request.weights_version is not None:
        of_model += f" with weights version {request.weights_version}"
    if not fleet:
        return [f"no instance{of_model} is registered"]
    fitting = {side: [i for i in ready[side] if fits(i, request)] for side in SIDES}
    reasons = []
    for side in SIDES:
        if not ready[side]:
            others = _states([i for i in fleet if i.role.serves(side)])
            reasons.append(f"no {side} instance{of_model} is ready ({others})")
        elif not fitting[side]:
            reasons.append(_too_few_blocks(ready[side], f"{side} instance{of_model}", request))
    if reasons:
        return reasons
    mismatches = _mismatches(fitting[Role.PREFILL], fitting[Role.DECODE])
    if mismatches:
        more = len(mismatches) - _MISMATCHES_TOLD
        told = mismatches[:_MISMATCHES_TOLD]
        return [*told, f"and {more} more like this"] if more > 0 else told
    return [f"only one instance{of_model} is ready, and a transfer takes two"]


def _of(model: str | None) -> str:
    return "" if model is None else f" of model {model!r}"


def _states(instances: Sequence[Instance]) -> str:
    states = Counter(i.state.value for i in instances)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return told or "none registered"


def _too_few_blocks(ready: Sequence[Instance], what: str, request: TransferRequest) -> str:
    most = _first(ready, available_blocks)
    return (
        f"no {what} has the {blocks_for(most, request)} KV blocks free "
        f"(most: {most.instance_id!r} with {available_blocks(most)})"
    )


def _versions_there(of_model: Sequence[Instance], request: TransferRequest) -> str:
    of = _of(request.model)
    told = Counter(i.weights_version for i in of_model if i.weights_version is not None)
    there = [f"{version} ({count})" for version, count in sorted(told.items())]
    if silent := len(of_model) - told.total():
        there.append(f"not told ({silent})")
    return (
        f"no instance{of} serves weights version {request.weights_version}; there are "
        f"{', '.join(there)}"
    )


def _mismatches(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> list[str]:
    """One sentence for each two kinds that do not match, about the emptiest of each."""
    ours, theirs = ({kind_of(i): i for i in _by_load(side)} for side in (prefills, decodes))
    return [
        f"prefill {prefill.instance_id!r} and decode {decode.instance_id!r} do not match: {said}"
        for kind, prefill in ours.items()
        for other, decode in theirs.items()
        if (said := mismatch_of(kind, other)) is not None
    ]


def _first(instances: Iterable[Instance], most: Callable[[Instance], int]) -> Instance:
    """The one that has most, of equal ones the first by id: every replica names the same."""
    return min(instances, key=lambda i: (-most(i), i.instance_id))


def _by_load(instances: Sequence[Instance]) -> list[Instance]:
    """The fullest first, so that in a dict the emptiest one of a key stays."""
    return sorted(instances, key=lambda i: (occupancy(i), i.instance_id), reverse=True)
