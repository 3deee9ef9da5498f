"""The box of each parameter that a rank has, when several ranks compute one model together.

Attention is split by heads, the feed-forward network by its inner dimension, embedding and output
head by the vocabulary. Every rank has the norms, and the biases that are added to sums of all
ranks. If there are fewer KV heads than ranks, neighbouring ranks have the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from torch import Tensor

from kvxfer.errors import InvalidArgument
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.weights import EMBEDDING, LM_HEAD, weight_shapes
from kvxfer.weights.holdings import Holding, Holdings


class Shard(NamedTuple):
    """One rank of several. Rank 0 of 1 has everything."""

    rank: int = 0
    ranks: int = 1


WHOLE: Final = Shard()


class Box(NamedTuple):
    """The box of one parameter, in elements along each dimension. A parameter that is split has a
    `dimension`, along which the rank has `length` elements from `first` on; they may be none."""

    whole: tuple[int, ...]
    dimension: int | None
    first: int
    length: int

    @property
    def offset(self) -> tuple[int, ...]:
        return tuple(self.first if at == self.dimension else 0 for at in range(len(self.whole)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            self.length if at == self.dimension else size for at, size in enumerate(self.whole)
        )


def local_config(config: LlamaConfig, ranks: int) -> LlamaConfig:
    """Returns the config with the heads and inner dimension of one rank; the rest is that of the
    whole model.

    Raises InvalidArgument if they cannot be divided evenly.
    """
    if ranks < 1:
        raise InvalidArgument(f"{ranks} ranks compute nothing; use at least 1")
    if ranks > 1 and config.num_experts:
        raise InvalidArgument(
            f"{config.name}: experts are spread over ranks, not cut; use "
            "kvxfer.reference.expert_parallel"
        )
    for what, size in (("heads", config.num_heads), ("inner dimension", config.intermediate_size)):
        if size % ranks:
            raise InvalidArgument(
                f"{config.name}: {what} {size} cannot be split over {ranks} ranks; use a number "
                "of ranks that divides it"
            )
    kv_heads = config.num_kv_heads
    if kv_heads % ranks and ranks % kv_heads:
        raise InvalidArgument(
            f"{config.name}: {kv_heads} KV heads cannot be divided among {ranks} ranks; one number "
            "must be a multiple of the other"
        )
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(kv_heads // ranks, 1),
        intermediate_size=config.intermediate_size // ranks,
    )


def vocabulary_rows(config: LlamaConfig, ranks: int) -> int:
    """Returns the embedding rows that each rank has in memory; the last ranks have padding."""
    return -(-config.vocab_size // ranks)


def boxes_of(config: LlamaConfig, shard: Shard) -> dict[str, Box]:
    """Returns the box of each parameter of the model, by its name. Raises InvalidArgument as
    local_config() does, and if there is no such rank."""
    return dict(_boxes(config, shard))


def holdings_of(config: LlamaConfig, shard: Shard, dtype: str = "float32") -> Holdings:
    """Returns the boxes that a rank wants of an update in this type. Raises as boxes_of() does."""
    return Holdings(
        parameters=tuple(
            Holding(name=name, dtype=dtype, whole=box.whole, offset=box.offset, shape=box.shape)
            for name, box in _boxes(config, shard)
            if box.length
        ),
        tied={LM_HEAD: EMBEDDING} if config.tie_embeddings else {},
    )


def cut(config: LlamaConfig, weights: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """Returns views of a rank's boxes in whole parameters."""
    return {
        name: weights[name]
        if box.dimension is None
        else weights[name].narrow(box.dimension, box.first, box.length)
        for name, box in _boxes(config, shard)
        if box.length
    }


def _boxes(config: LlamaConfig, shard: Shard) -> Iterator[tuple[str, Box]]:
    rank, ranks = shard
    local = local_config(config, ranks)
    if not 0 <= rank < ranks:
        raise InvalidArgument(f"there is no rank {rank} of {ranks}; the first one is 0")
    rows = vocabulary_rows(config, ranks)
    # Query heads of a rank need the KV heads of their group, and no others.
    first_kv_head = rank * config.num_kv_heads // ranks
    spans = {
        "q_proj": (rank * local.num_heads * config.head_size, local.num_heads * config.head_size),
        "k_proj": (first_kv_head * config.head_size, local.num_kv_heads * config.head_size),
        "gate_proj": (rank * local.intermediate_size, local.intermediate_size),
        "embedding": (
            min(rank * rows, config.vocab_size - 1),
            max(min(rows, config.vocab_size - rank * rows), 0),
        ),
    }
    spans |= {
        "v_proj": spans["k_proj"],
        "o_proj": spans["q_proj"],
        "up_proj": spans["gate_proj"],
        "down_proj": spans["gate_proj"],
    }
    for name, whole in weight_shapes(config):
        part = "embedding" if name in (EMBEDDING, LM_HEAD) else name.split(".")[-2]
        summed = part in ("o_proj", "down_proj")
        if ranks == 1 or part not in spans or (summed and name.endswith(".bias")):
            yield name, Box(whole, None, 0, whole[0])
        else:
            yield name, Box(whole, 1 if summed else 0, *spans[part])
