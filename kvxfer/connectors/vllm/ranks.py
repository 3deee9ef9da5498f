"""The ranks of a vLLM instance: this worker's, and the engine addresses of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed
from vllm.distributed.parallel_state import get_tp_group

from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorRank:
    """A worker's place among those of its instance."""

    size: int = 1
    rank: int = 0


def require_tensor_parallel(parallel: ParallelConfig) -> None:
    """Raises InvalidArgument if the KV cache is split by more than its heads."""
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = getattr(parallel, name)
        if size != 1:
            option = name.replace("_", "-")
            raise InvalidArgument(
                f"kvxfer supports vLLM instances that are split by tensor parallelism alone, this "
                f"one has {name}={size}; start it with --{option} 1"
            )


def require_own_api(parallel: ParallelConfig) -> None:
    """Raises InvalidArgument if engines of several data parallel ranks are behind one API:
    vLLM chooses among them for each request, and a ticket is for one of them."""
    if parallel.data_parallel_external_lb:
        return
    # Ranks of dense models know of no other rank; all but the first know their number.
    if parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0:
        raise InvalidArgument(
            "this vLLM server has several data parallel engines behind one API, and the router "
            "cannot send a request to the one of them that its ticket is for; start a server with "
            "its own port for each rank: --data-parallel-external-lb with --data-parallel-rank, or "
            "for a dense model servers without --data-parallel-size"
        )


def this_rank() -> TensorRank:
    group = get_tp_group()
    return TensorRank(group.world_size, group.rank_in_group)


def from_first_rank(make: Callable[[], T]) -> T:
    """Returns on every rank what the first rank makes. Every rank calls this."""
    group = get_tp_group()
    made = [make() if group.rank_in_group == 0 else None]
    torch.distributed.broadcast_object_list(made, group.ranks[0], group=group.cpu_group)
    return cast("T", made[0])


def gather_addresses(address: str) -> list[str]:
    """Returns the addresses of all ranks in their order. Every rank calls this with its own."""
    group = get_tp_group()
    addresses = [""] * group.world_size
    torch.distributed.all_gather_object(addresses, address, group=group.cpu_group)
    return addresses
