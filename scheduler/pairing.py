"""The prefill and decode instances that can serve a request: pure functions over the fleet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvxfer.errors import LayoutMismatch
from kvxfer.instances import Instance, Role
from kvxfer.kv.ranks import require_mappable, sources, targets
from kvxfer.kv_versions import UNTOLD, Versions, require_common_version
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity, require_same_model
from kvxfer.transfers import AloneBecause, Score, TransferRequest

SIDES: Final = (Role.PREFILL, Role.DECODE)
_OF_RANKS: Final = ("tp_size", "tp_rank", "pp_size", "pp_rank")


@dataclass(frozen=True, slots=True)
class Pair:
    """A choice of instances, and the KV blocks that the request takes on each side."""

    prefill: Instance
    decode: Instance
    prefill_blocks: int
    decode_blocks: int
    cached_tokens: int = 0
    """The tokens of the prompt that the cache is assumed to have."""
    alone_because: AloneBecause = ""
    """The reason for one instance, if the request did not ask for one."""
    score: Score | None = None
    """The reasons for this pair, if the request asked for them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of an instance that decide with which others it can exchange a KV cache."""

    model: str
    layout: KvLayout
    fabrics: tuple[str, ...]
    whole: bool = True
    """Whether all ranks are registered, not only that of `layout`."""
    identity: ModelIdentity | None = None
    kv_versions: Versions = UNTOLD
    aggregates: bool = False
    """Whether it serves requests alone."""

    @property
    def weights_version(self) -> int | None:
        return None if self.identity is None else self.identity.weights_version

    def serves(self, request: TransferRequest) -> bool:
        """Whether it is of the weights version that the request asks for."""
        return request.weights_version in (None, self.weights_version)


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
        instance.aggregates,
    )


def fabric_steps(prefill: Kind, decode: Kind) -> int:
    """Returns the number of fabrics that prefill prefers to the best one that both have.

    `local` does not count: its use depends on the host, which the distance covers.
    """
    preferred = [fabric for fabric in prefill.fabrics if fabric != "local"]
    return next((i for i, fabric in enumerate(preferred) if fabric in decode.fabrics), 0)


def check_pair(prefill: Instance, decode: Instance) -> None:
    """Raises LayoutMismatch that names the first thing the two do not have in common."""
    mismatch = _compare(kind_of(prefill), kind_of(decode))
    if mismatch is not None:
        raise mismatch


def common_fabrics(prefill: Instance, decode: Instance) -> tuple[str, ...]:
    """Returns the fabrics that the two can use with each other, in the order that prefill prefers.

    Leaves out `local` if both name their hosts and these differ, unless nothing else is left.
    """
    common = tuple(fabric for fabric in prefill.fabrics if fabric in decode.fabrics)
    hosts = {prefill.labels.get("host"), decode.labels.get("host")} - {None}
    if len(hosts) > 1:
        return tuple(fabric for fabric in common if fabric != "local") or common
    return common


def prompt_blocks(instance: Instance, request: TransferRequest) -> int:
    """Returns the KV blocks that the prompt takes on the instance; 0 if its length is unknown."""
    return instance.layout.blocks_for(request.prompt_tokens or 0)


@lru_cache(maxsize=4096)
def mismatch_of(prefill: Kind, decode: Kind) -> str | None:
    """Returns what keeps the two kinds from exchanging a KV cache, in words; None if nothing."""
    mismatch = _compare(prefill, decode)
    if mismatch is None:
        return None
    return f"{mismatch.field} is {mismatch.prefill!r} and {mismatch.decode!r}"


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
