"""Dispatch and combine of mixture-of-experts models, which survive the loss of a rank.

    with AllToAll(shape, rank=rank, ranks=ranks, cluster_key=key, exchange=gather) as group:
        group.dispatch_send(x, topk_ids, topk_weights)
        got = group.dispatch_recv()
        group.combine_send(experts(got))
        combined = group.combine_recv()     # combined.missing names the ranks that were lost

See docs/moe.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvxfer.moe.all_to_all import AllToAll
    from kvxfer.moe.module import GroupedExperts, LocalExperts, MoEAllToAll
    from kvxfer.moe.placement import Placement
    from kvxfer.moe.results import Combined, Dispatched
    from kvxfer.moe.shape import MoeShape

# Imported on first use: the shape and the placement need no engine.
_HOMES: Final = {
    "AllToAll": "kvxfer.moe.all_to_all",
    "Combined": "kvxfer.moe.results",
    "Dispatched": "kvxfer.moe.results",
    "GroupedExperts": "kvxfer.moe.module",
    "LocalExperts": "kvxfer.moe.module",
    "MoEAllToAll": "kvxfer.moe.module",
    "MoeShape": "kvxfer.moe.shape",
    "Placement": "kvxfer.moe.placement",
}

__all__ = [
    "AllToAll",
    "Combined",
    "Dispatched",
    "GroupedExperts",
    "LocalExperts",
    "MoEAllToAll",
    "MoeShape",
    "Placement",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
