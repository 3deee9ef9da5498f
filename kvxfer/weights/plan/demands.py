"""The boxes that inference ranks want, and the training ranks that hold them.

Parameters that the same ranks keep in the same way on both sides are one *class*, planned once. A
*demand* is a box that one inference rank wants of every parameter of a class, and that is held by
the same training ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np

from kvxfer.errors import InvalidArgument
from kvxfer.weights.maps import Parameters, Side, WeightMap
from kvxfer.weights.plan.boxes import (
    Ints,
    Pattern,
    disjoint,
    meetings,
    pattern_of,
    said,
    volumes,
)

_Owners: TypeAlias = tuple[int, ...]


class ParameterClass(NamedTuple):
    """Parameters that are planned as one."""

    names: tuple[str, ...]
    """The names at inference."""
    sources: tuple[str, ...]
    """The names at training, which differ if parameters are tied."""
    item_bytes: int
    held: Pattern
    wanted: Pattern


@dataclass(frozen=True, slots=True)
class Demands:
    """All demands, one per row of the arrays."""

    classes: tuple[ParameterClass, ...]
    of_class: Ints
    holders: Ints
    """Indices into `holder_sets`."""
    holder_sets: tuple[tuple[int, ...], ...]
    receiver: Ints
    box: tuple[Ints, ...]
    """Boxes `[dimensions, 2]` of the whole parameter."""
    nbytes: Ints
    """Bytes of the box in one parameter."""
    padding_bytes: int
    """Bytes that are wanted, but are padding and not sent."""
    unwanted: tuple[str, ...]
    """Names that are held, but wanted by no rank, in the order of the map."""


def demands_of(weights: WeightMap) -> Demands:
    """Derives the demands. Raises InvalidArgument that names the parameter that cannot be mapped,
    and why."""
    classes, unwanted = _classes(weights)
    sets: dict[tuple[int, ...], int] = {}
    of_class: list[int] = []
    holders: list[int] = []
    receiver: list[int] = []
    nbytes: list[int] = []
    boxes: list[Ints] = []
    padding = 0
    for number, each in enumerate(classes):
        held, wanted, met = meetings(each.held.boxes, each.wanted.boxes)
        _require_all_held(each, wanted, met)
        lengths = (volumes(met) * each.item_bytes).tolist()
        for source, target, box, length in zip(
            held.tolist(), wanted.tolist(), met, lengths, strict=True
        ):
            ranks = each.held.ranks[source]
            index = sets.setdefault(ranks, len(sets))
            takers = each.wanted.ranks[target]
            of_class += [number] * len(takers)
            holders += [index] * len(takers)
            receiver += takers
            boxes += [box] * len(takers)
            nbytes += [length] * len(takers)
        whole = sum(int(volumes(box)) for box in each.wanted.whole.values())
        taken = zip(volumes(each.wanted.boxes).tolist(), each.wanted.ranks, strict=True)
        real = sum(volume * len(ranks) for volume, ranks in taken)
        padding += (whole - real) * each.item_bytes * len(each.names)
    return Demands(
        classes=classes,
        of_class=np.array(of_class, np.int64),
        holders=np.array(holders, np.int64),
        holder_sets=tuple(sets),
        receiver=np.array(receiver, np.int64),
        box=tuple(boxes),
        nbytes=np.array(nbytes, np.int64),
        padding_bytes=padding,
        unwanted=unwanted,
    )


def _classes(weights: WeightMap) -> tuple[tuple[ParameterClass, ...], tuple[str, ...]]:
    train, infer = weights.train, weights.infer
    held = {
        name: (number, owners)
        for number, parameters in enumerate(train.parameters)
        for name, owners in zip(parameters.names(), _owners(train, parameters), strict=True)
    }
    used = set(infer.tied)
    members: dict[tuple[int, _Owners, int, _Owners], list[tuple[str, str]]] = {}
    for number, parameters in enumerate(infer.parameters):
        for name, owners in zip(parameters.names(), _owners(infer, parameters), strict=True):
            source = train.tied.get(name, name)
            if name in infer.tied:  # sent as the one that it is tied to
                continue
            if source not in held:
                raise InvalidArgument(
                    f"inference wants {name}, which no training rank holds; describe it under "
                    "train.parameters, or under train.tied"
                )
            used |= {name, source}
            members.setdefault((*held[source], number, owners), []).append((name, source))
    _require_ties(weights, held)

    @cache
    def held_as(number: int, owners: _Owners) -> Pattern:
        return disjoint(_pattern(train, train.parameters[number], owners))

    @cache
    def wanted_as(number: int, owners: _Owners) -> Pattern:
        return _pattern(infer, infer.parameters[number], owners)

    classes = []
    for (ours_at, our_owners, theirs_at, their_owners), pairs in members.items():
        ours, theirs = train.parameters[ours_at], infer.parameters[theirs_at]
        _require_same(pairs[0][0], ours, theirs)
        names, sources = zip(*pairs, strict=True)
        classes.append(
            ParameterClass(
                names,
                sources,
                theirs.item_bytes,
                held_as(ours_at, our_owners),
                wanted_as(theirs_at, their_owners),
            )
        )
    return tuple(classes), tuple(name for name in held if name not in used)


def _owners(side: Side, parameters: Parameters) -> list[_Owners]:
    """Returns the owners of each name, in order: a coordinate along the axes of each `owner`."""
    found: list[_Owners] = [()]
    for index, (first, end) in parameters.each.items():
        count = end - first
        if index not in parameters.owner:
            found = [each for each in found for _ in range(count)]
        else:
            size = math.prod(side.mesh[axis] for axis in parameters.owner[index])
            found = [(*each, at * size // count) for each in found for at in range(count)]
    return found * (1 + len(parameters.alike))  # names of `alike` have no indices


def _pattern(side: Side, parameters: Parameters, owners: _Owners) -> Pattern:
    coordinates: dict[str, int] = {}
    indices = [index for index in parameters.each if index in parameters.owner]
    for index, owner in zip(indices, owners, strict=True):
        for axis in reversed(parameters.owner[index]):
            owner, coordinates[axis] = divmod(owner, side.mesh[axis])
    return pattern_of(side, parameters, coordinates)


def _require_same(name: str, ours: Parameters, theirs: Parameters) -> None:
    if ours.dtype != theirs.dtype:
        raise InvalidArgument(
            f"{name} is {ours.dtype} at training and {theirs.dtype} at inference; convert it "
            "before it is sent, and describe what is sent"
        )
    if ours.trained_shape != theirs.trained_shape:
        raise InvalidArgument(
            f"{name} is {list(ours.trained_shape)} at training and {list(theirs.trained_shape)} "
            "at inference, without padding; describe both as the checkpoint has it, and name "
            "further rows as padding"
        )


def _require_ties(weights: WeightMap, held: Mapping[str, object]) -> None:
    """Raises InvalidArgument if one storage at inference would take two of training."""
    train, infer = weights.train, weights.infer
    for name, whole in infer.tied.items():
        if (name in held or name in train.tied) and (
            train.tied.get(name, name) != train.tied.get(whole, whole)
        ):
            raise InvalidArgument(
                f"{name} is tied to {whole} at inference, and a separate parameter at training; "
                "tie them at training, or at neither side"
            )


def _require_all_held(each: ParameterClass, wanted: Ints, met: Ints) -> None:
    """Raises InvalidArgument if part of a wanted box is not held.

    The boxes of holders do not overlap, so the parts that they hold of a box add up to it.
    """
    found = np.bincount(wanted, weights=volumes(met), minlength=len(each.wanted.boxes))
    missing = np.flatnonzero(found.astype(np.int64) != volumes(each.wanted.boxes))
    if len(missing):
        first = missing[0]
        raise InvalidArgument(
            f"inference rank {each.wanted.ranks[first][0]} wants "
            f"{said(each.wanted.boxes[first])} of {each.names[0]}, and part of that is held by no "
            "training rank; make train.parameters cover it"
        )
