"""The parameters of a model that training ranks hold and inference ranks want.

Nothing is listed per rank. One record describes all parameters with the same shape and
distribution. The ranks of a side are a mesh, like torch's DeviceMesh, whose axes split them.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvxfer.errors import InvalidArgument
from kvxfer.layout import ITEM_BYTES

_MOST_DIMENSIONS: Final = 8
_MOST_RANKS: Final = 1 << 14
_MOST_PARAMETERS: Final = 1 << 22
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_Size = Annotated[int, Meta(ge=1, le=1 << 40)]
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class _Described(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A part of a weight map, which is read and written as JSON (docs/weight-maps.md)."""


class Part(_Described, frozen=True, kw_only=True):
    """A box of a parameter, and the ranks that have it: each has the whole box."""

    ranks: tuple[_Count, ...]
    offset: tuple[_Count, ...]
    """The position of the first element along each dimension."""
    shape: tuple[_Size, ...]


class Parameters(_Described, frozen=True, kw_only=True):
    """Parameters with the same shape and distribution: one, or one for each value of the indices in
    the name. Raises InvalidArgument that names the member, its value and the remedy.

    A rank has a box of each parameter. Along an axis of the mesh that none of `split`, `owner` and
    `only` names, the ranks are replicas.
    """

    name: str
    """The name in the checkpoint, with `{index}` for each index of `each`."""
    shape: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=_MOST_DIMENSIONS)]
    """The shape of the whole parameter, with padding."""
    dtype: str
    """The element type, as torch names it."""
    each: dict[str, tuple[_Count, _Count]] = {}
    """The first value of each index, and the value after the last."""
    split: tuple[tuple[str, ...], ...] = ()
    """The axes that split each dimension, the outermost first; () splits none. Each of n parts has
    ceil(length / n) elements, the last ones fewer or none, as with torch.chunk."""
    owner: dict[str, tuple[str, ...]] = {}
    """The axes along which the values of an index are dealt out in equal runs, the outermost first:
    the i-th of n values belongs to coordinate i * size // n."""
    only: dict[str, _Count] = {}
    """The only coordinate along an axis whose ranks have these parameters."""
    alike: tuple[str, ...] = ()
    """Names of further parameters with the same distribution; instead of `each`."""
    padding: tuple[_Count, ...] = ()
    """The number of padding elements at the end of each dimension; () for none. No padding is
    sent."""
    parts: tuple[Part, ...] = ()
    """The boxes of ranks in a distribution without a mesh; instead of split, owner and only."""

    def __post_init__(self) -> None:
        self._require_dtype()
        self._require_indices()
        self._require_dimensions()
        self._require_parts()

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def count(self) -> int:
        """The number of parameters in this record."""
        return math.prod(end - first for first, end in self.each.values()) + len(self.alike)

    @property
    def trained_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        padding = self.padding or (0,) * len(self.shape)
        return tuple(size - pad for size, pad in zip(self.shape, padding, strict=True))

    def names(self) -> list[str]:
        """Returns the name of each parameter; the last index of `each` changes fastest."""
        names = [self.name]
        for index, (first, end) in self.each.items():
            word = f"{{{index}}}"
            names = [
                name.replace(word, str(value)) for name in names for value in range(first, end)
            ]
        return [*names, *self.alike]

    def _refuse(self, field: str, value: object, remedy: str) -> InvalidArgument:
        return InvalidArgument(f"{field} of {self.name} is {value!r}; {remedy}")

    def _require_dtype(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise self._refuse("dtype", self.dtype, f"use one of {', '.join(ITEM_BYTES)}")

    def _require_indices(self) -> None:
        written = _PLACEHOLDER.findall(self.name)
        if sorted(written) != sorted(self.each):
            raise self._refuse(
                "each", sorted(self.each), f"the name has the indices {sorted(written)}"
            )
        for index, (first, end) in self.each.items():
            if not first < end:
                raise self._refuse(
                    f"each.{index}",
                    (first, end),
                    "write the first value and the one after the last",
                )
        if self.alike and self.each:
            raise self._refuse("alike", self.alike[:1], "leave each out, or write a record for it")
        if self.count > _MOST_PARAMETERS:
            raise self._refuse("each", self.each, f"a record has at most {_MOST_PARAMETERS}")
        for index in self.owner:
            if index not in self.each:
                raise self._refuse("owner", index, f"use an index of {sorted(self.each)}")

    def _require_dimensions(self) -> None:
        for field, value in (("split", self.split), ("padding", self.padding)):
            if value and len(value) != len(self.shape):
                raise self._refuse(
                    field, value, f"write one for each of {len(self.shape)} dimensions"
                )
        if min(self.trained_shape) < 1:
            raise self._refuse("padding", self.padding, f"leave some elements of {self.shape}")
        used = [axis for axes in (*self.owner.values(), self.only, *self.split) for axis in axes]
        if twice := sorted({axis for axis in used if used.count(axis) > 1}):
            raise self._refuse("axis", twice[0], "name it once in split, owner and only")

    def _require_parts(self) -> None:
        if self.parts and (self.split or self.owner or self.only):
            raise self._refuse("parts", "given", "leave split, owner and only out")
        seen: set[int] = set()
        for part in self.parts:
            if not len(part.offset) == len(part.shape) == len(self.shape):
                raise self._refuse(
                    "parts", part.offset, f"write offset and shape of {len(self.shape)} dimensions"
                )
            ends = [offset + size for offset, size in zip(part.offset, part.shape, strict=True)]
            if any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise self._refuse("parts", part.offset, f"stay inside the shape {self.shape}")
            if len(set(part.ranks)) != len(part.ranks) or seen & set(part.ranks):
                raise self._refuse("parts", part.ranks, "give each rank one box at most")
            seen |= set(part.ranks)


class Side(_Described, frozen=True, kw_only=True):
    """The ranks of the training or the inference side, and the parameters that they keep.
    Raises InvalidArgument that names the member, its value and the remedy."""

    mesh: Annotated[dict[str, _Size], Meta(min_length=1)]
    """Axes and their sizes, the outermost first. Along the last axis, rank numbers rise by one."""
    parameters: tuple[Parameters, ...]
    tied: dict[str, str] = {}
    """Names of tied parameters, each with that of the parameter whose storage it shares."""
    nics: Annotated[int, Meta(ge=1, le=64)] = 1
    """NICs of each rank."""
    hosts: tuple[str, ...] = ()
    """The host of each rank; () if hosts do not matter. Both sides use the same names."""
    zones: tuple[str, ...] = ()
    """The zone of each rank (a rack, a rail group), in the same way."""

    def __post_init__(self) -> None:
        if self.ranks > _MOST_RANKS:
            raise InvalidArgument(f"mesh has {self.ranks} ranks; at most {_MOST_RANKS} are planned")
        for axis in self.mesh:
            if not _WORD.fullmatch(axis):
                raise InvalidArgument(f"mesh has the axis {axis!r}; use letters, digits and _")
        for field, labels in (("hosts", self.hosts), ("zones", self.zones)):
            if labels and len(labels) != self.ranks:
                raise InvalidArgument(
                    f"{field} has {len(labels)} names; write one for each of {self.ranks} ranks"
                )
        for parameters in self.parameters:
            self._require_ranks_of(parameters)
        self._require_names()

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def _require_ranks_of(self, parameters: Parameters) -> None:
        groups = (*parameters.split, *parameters.owner.values(), parameters.only)
        for axis in (axis for axes in groups for axis in axes):
            if axis not in self.mesh:
                raise InvalidArgument(
                    f"{parameters.name} uses the axis {axis!r}; mesh has {', '.join(self.mesh)}"
                )
        for axis, coordinate in parameters.only.items():
            if coordinate >= self.mesh[axis]:
                raise InvalidArgument(
                    f"only.{axis} of {parameters.name} is {coordinate}; use less than "
                    f"{self.mesh[axis]}"
                )
        highest = max((rank for part in parameters.parts for rank in part.ranks), default=0)
        if highest >= self.ranks:
            raise InvalidArgument(
                f"parts of {parameters.name} name rank {highest}; use less than {self.ranks}"
            )

    def _require_names(self) -> None:
        if sum(parameters.count for parameters in self.parameters) > _MOST_PARAMETERS:
            raise InvalidArgument(
                f"a side has too many parameters; write at most {_MOST_PARAMETERS}"
            )
        names: set[str] = set()
        for parameters in self.parameters:
            own = parameters.names()
            if twice := names.intersection(own):
                raise InvalidArgument(f"{min(twice)} is described twice; describe it once")
            names.update(own)
        for name, whole in self.tied.items():
            if whole not in names or whole in self.tied:
                raise InvalidArgument(
                    f"tied.{name} is {whole!r}; name a parameter of this side that is not tied"
                )


class WeightMap(_Described, frozen=True, kw_only=True):
    """The two sides of an update: what is held, and what is wanted."""

    train: Side
    infer: Side
    version: Literal[1] = 1
    """The version of this format."""
