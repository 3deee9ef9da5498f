"""The box that a rank has of a parameter, from the placements of torch's DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias, cast

from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
    _StridedShardOffsetMode,
)

from kvxfer.errors import InvalidArgument

_Indices: TypeAlias = tuple[Sequence[int], ...]
"""The indices that a rank has in each dimension, rising; () if it has nothing."""


class Box(NamedTuple):
    """A box of a whole parameter, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


NOTHING: Final = Box((), ())


def box_of(
    name: str,
    whole: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    local: tuple[int, ...],
) -> Box:
    """Returns the box of the rank at `coordinate` of a mesh; may be NOTHING. `local` is the shape
    of its tensor.

    torch has two readings of a strided shard, which differ if its dimension does not divide evenly:
    fully_shard() makes tensors by one of them, distribute_tensor() by the other. The right one has
    the shape `local`. If both have that shape, but differ, the rank is refused.

    Raises InvalidArgument if the rank's part is not a box, or is a summand (Partial).
    """
    for placement in placements:
        if isinstance(placement, Partial):
            raise InvalidArgument(
                f"{name} is {placement}: this rank has a summand; redistribute it to Replicate() "
                "or Shard() first"
            )
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            raise InvalidArgument(
                f"{name} has the placement {placement}; use Shard() and Replicate()"
            )
    readings = _readings(whole, mesh, coordinate, placements)
    fitting = [held for held in readings if _shape(held) == local or (not held and 0 in local)]
    where = f"{list(placements)} on a mesh of {list(mesh)}"
    if not fitting:
        raise InvalidArgument(
            f"{name}: this rank has {list(local)} of {list(whole)}, which is not its part by "
            f"{where}; give the shape of the whole tensor to DTensor.from_local()"
        )
    held = fitting[0]
    if len(fitting) > 1 or not all(isinstance(along, range) for along in held):
        raise InvalidArgument(
            f"{name}: this rank's part of {list(whole)} is not a single box, by {where}; "
            "redistribute it so that each rank has one box"
        )
    return Box(tuple(along[0] for along in held), _shape(held)) if held else NOTHING


def _shape(held: _Indices) -> tuple[int, ...]:
    return tuple(map(len, held))


@lru_cache(maxsize=1024)  # layers are alike, and a strided shard lists each index
def _readings(
    whole: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> frozenset[_Indices]:
    """Returns the possible readings: one, or two if there are strided shards."""
    if not any(isinstance(each, _StridedShard) for each in placements):
        found = [_in_order(range(len(mesh)), whole, mesh, coordinate, placements)]
    else:
        found = [_left_to_right(whole, mesh, coordinate, placements)]
        if (order := _order(mesh, placements)) is not None:
            found.append(_in_order(order, whole, mesh, coordinate, placements))
    return frozenset(tuple(map(_run, held)) if all(held) else () for held in found)


def _run(along: Sequence[int]) -> Sequence[int]:
    """Returns a range if the indices have no gap."""
    if along[-1] - along[0] + 1 == len(along):
        return range(along[0], along[-1] + 1)
    return tuple(along)


def _left_to_right(
    whole: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> _Indices:
    """Splits placement by placement; a strided one gives a rank several pieces."""
    held: list[Sequence[int]] = [range(length) for length in whole]
    for size, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            along = held[placement.dim]
            _, chosen = placement.local_shard_size_and_offset(
                len(along), size, rank, _StridedShardOffsetMode.ALL
            )
            indices = cast("list[int]", chosen)  # ALL: a list
            held[placement.dim] = [along[index] for index in indices]
        elif isinstance(placement, Shard):
            held[placement.dim] = _split(held[placement.dim], size, rank)
    return tuple(held)


def _in_order(
    order: Sequence[int],
    whole: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> _Indices:
    """Splits by the axes of the mesh in this order, each into one piece for a rank."""
    held: list[Sequence[int]] = [range(length) for length in whole]
    for axis in order:
        placement = placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            held[placement.dim] = _split(held[placement.dim], mesh[axis], coordinate[axis])
    return tuple(held)


def _split(along: Sequence[int], size: int, rank: int) -> Sequence[int]:
    length, start = Shard.local_shard_size_and_offset(len(along), size, rank)
    return along[start : start + length]


def _order(mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> tuple[int, ...] | None:
    """Returns the order in which the axes split, if strided shards express one; None otherwise.

    The factor of a strided shard is the number of parts into which the dimension is split already,
    by axes to its right that split before it.
    """
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(mesh))):
        placement = placements[axis]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        order = orders.setdefault(placement.dim, [])
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        before, parts = 0, 1
        while parts != factor and before < len(order):
            parts *= mesh[order[before]]
            before += 1
        if parts != factor:
            return None
        order.insert(before, axis)
    return tuple(axis for order in orders.values() for axis in order)
