"""A Llama-like model of a given size: the parts of training ranks and of inference ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

import torch

from kvxfer.weights.holdings import Holding, Holdings

DTYPE: Final = "bfloat16"
_ITEM: Final = 2

Slices: TypeAlias = tuple[slice, ...]


class Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    split: int | None
    """The dimension that tensor parallelism splits at inference; None if each rank has all."""


def model_of(nbytes: int) -> list[Parameter]:
    """Returns a model of about `nbytes` bytes, with as many layers as necessary."""
    large = nbytes >= 1 << 29
    hidden, inner, kv, vocabulary = (2048, 8192, 512, 32000) if large else (256, 1024, 64, 2000)
    layer = [
        ("self_attn.q_proj", (hidden, hidden), 0),
        ("self_attn.k_proj", (kv, hidden), 0),
        ("self_attn.v_proj", (kv, hidden), 0),
        ("self_attn.o_proj", (hidden, hidden), 1),
        ("mlp.gate_proj", (inner, hidden), 0),
        ("mlp.up_proj", (inner, hidden), 0),
        ("mlp.down_proj", (hidden, inner), 1),
        ("input_layernorm", (hidden,), None),
        ("post_attention_layernorm", (hidden,), None),
    ]
    ends = [
        Parameter("model.embed_tokens.weight", (vocabulary, hidden), 0),
        Parameter("lm_head.weight", (vocabulary, hidden), 0),
        Parameter("model.norm.weight", (hidden,), None),
    ]
    one = sum(_bytes(shape) for _, shape, _ in layer)
    layers = max(1, round((nbytes - sum(_bytes(each.shape) for each in ends)) / one))
    return ends + [
        Parameter(f"model.layers.{number}.{name}.weight", shape, split)
        for number in range(layers)
        for name, shape, split in layer
    ]


def _bytes(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * _ITEM


def held_by(model: list[Parameter], rank: int, ranks: int) -> Holdings:
    """Returns a rank's holdings as with FSDP: a part of the rows of each parameter."""
    return Holdings(tuple(_part(each, 0, rank, ranks) for each in model))


def wanted_by(model: list[Parameter], rank: int, ranks: int) -> Holdings:
    """Returns a rank's holdings as with vLLM's tensor parallelism."""
    return Holdings(tuple(_part(each, each.split, rank, ranks) for each in model))


def _part(parameter: Parameter, dimension: int | None, rank: int, ranks: int) -> Holding:
    offset, shape = [0] * len(parameter.shape), list(parameter.shape)
    if dimension is not None:
        if shape[dimension] % ranks:
            raise ValueError(f"{parameter.name} does not divide by {ranks}")
        shape[dimension] //= ranks
        offset[dimension] = rank * shape[dimension]
    return Holding(parameter.name, DTYPE, parameter.shape, tuple(offset), tuple(shape))


class Piece(NamedTuple):
    """The part that one rank has and another wants, relative to each rank's box."""

    name: str
    held: Slices
    wanted: Slices
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _bytes(self.shape)


def pieces(held: Holdings, wanted: Holdings) -> Iterator[Piece]:
    """Yields the common parts of all parameters that both have, in order."""
    by_name = {each.name: each for each in wanted.parameters}
    for ours in held.parameters:
        theirs = by_name[ours.name]
        bounds = []
        for at, size, first, length in zip(
            ours.offset, ours.shape, theirs.offset, theirs.shape, strict=True
        ):
            bounds.append((max(at, first), min(at + size, first + length)))
        if all(begin < end for begin, end in bounds):
            yield Piece(
                ours.name,
                _within(bounds, ours.offset),
                _within(bounds, theirs.offset),
                tuple(end - begin for begin, end in bounds),
            )


def _within(bounds: list[tuple[int, int]], offset: tuple[int, ...]) -> Slices:
    return tuple(
        slice(begin - at, end - at) for (begin, end), at in zip(bounds, offset, strict=True)
    )


def content(holding: Holding, number: int) -> torch.Tensor:
    """Returns the constant content of the box: each element encodes the parameter and its place."""
    index = torch.zeros((), dtype=torch.int32)
    strides = torch.empty(holding.whole, device="meta").stride()
    for at, size, stride in zip(holding.offset, holding.shape, strides, strict=True):
        index = index.unsqueeze(-1) + torch.arange(at, at + size, dtype=torch.int32) * stride
    index.mul_(31).add_(number * 1009).bitwise_and_(0x3FFF)
    return index.to(torch.int16).view(torch.bfloat16)
