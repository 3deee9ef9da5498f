"""The boxes of parameters that each rank has or wants, and the weight map of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.layout import ITEM_BYTES
from kvxfer.weights.maps import Parameters, Part, Side, WeightMap

_Size = Annotated[int, Meta(ge=1, le=1 << 40)]
_Offset = Annotated[int, Meta(ge=0, le=1 << 40)]


class Holding(msgspec.Struct, frozen=True):
    """The box that one rank has of one parameter. Raises InvalidArgument."""

    name: str
    """The name in the checkpoint."""
    dtype: str
    """The element type, as torch names it."""
    whole: tuple[_Size, ...]
    """The shape of the whole parameter, without padding; a scalar has (1,)."""
    offset: tuple[_Offset, ...]
    """The offset of the box, in elements along each dimension."""
    shape: tuple[_Size, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InvalidArgument(
                f"{self.name} has the dtype {self.dtype!r}; use one of {', '.join(ITEM_BYTES)}"
            )
        if not len(self.whole) == len(self.offset) == len(self.shape) > 0:
            raise InvalidArgument(
                f"{self.name}: whole {self.whole}, offset {self.offset} and shape {self.shape} "
                "need the same number of dimensions, at least one"
            )
        ends = zip(self.offset, self.shape, self.whole, strict=True)
        if any(first + length > size for first, length, size in ends):
            raise InvalidArgument(
                f"{self.name}: the box {self.shape} at {self.offset} exceeds the shape {self.whole}"
            )

    @property
    def nbytes(self) -> int:
        """The bytes of the box."""
        elements = 1
        for length in self.shape:
            elements *= length
        return elements * ITEM_BYTES[self.dtype]


class Holdings(msgspec.Struct, frozen=True):
    """The boxes that one rank has, or wants."""

    parameters: tuple[Holding, ...]
    tied: dict[str, str] = {}
    """Names of tied parameters, each with that of the parameter whose storage it shares."""
    nics: int = 1
    host: str = ""
    zone: str = ""


def map_of(train: Sequence[Holdings], infer: Sequence[Holdings]) -> WeightMap:
    """Returns the map of all ranks, in their order.

    Raises WeightsMismatch if the ranks of a side contradict each other.
    """
    return WeightMap(train=_side("training", train), infer=_side("inference", infer))


_Form: TypeAlias = tuple[str, tuple[int, ...]]
_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def _side(side: str, ranks: Sequence[Holdings]) -> Side:
    forms: dict[str, _Form] = {}
    boxes: dict[str, dict[_Box, list[int]]] = {}
    tied: dict[str, str] = {}
    for rank, name, form, box in _rows(ranks):
        known = forms.setdefault(name, form)
        if known != form:
            raise WeightsMismatch(
                f"{name} is {known[0]} {list(known[1])} at one {side} rank and {form[0]} "
                f"{list(form[1])} at rank {rank}; load the same model on all of them"
            )
        boxes.setdefault(name, {}).setdefault(box, []).append(rank)
    for rank, holdings in enumerate(ranks):
        for name, whole in holdings.tied.items():
            if tied.setdefault(name, whole) != whole:
                raise WeightsMismatch(
                    f"{name} is tied to {tied[name]} at one {side} rank and to {whole} at rank "
                    f"{rank}; load the same model on all of them"
                )
    alike: dict[tuple[_Form, tuple[tuple[_Box, tuple[int, ...]], ...]], list[str]] = {}
    for name in sorted(forms):
        having = tuple((box, tuple(at)) for box, at in boxes[name].items())
        alike.setdefault((forms[name], having), []).append(name)
    hosts = [each.host for each in ranks]
    zones = [each.zone for each in ranks]
    return Side(
        mesh={"rank": len(ranks)},
        parameters=tuple(
            Parameters(
                name=names[0],
                alike=tuple(names[1:]),
                shape=form[1],
                dtype=form[0],
                parts=tuple(
                    Part(ranks=at, offset=offset, shape=shape) for (offset, shape), at in having
                ),
            )
            for (form, having), names in alike.items()
        ),
        tied=dict(sorted(tied.items())),
        nics=min((each.nics for each in ranks), default=1),
        hosts=tuple(hosts) if all(hosts) else (),
        zones=tuple(zones) if all(zones) else (),
    )


def _rows(ranks: Sequence[Holdings]) -> Iterator[tuple[int, str, _Form, _Box]]:
    for rank, holdings in enumerate(ranks):
        for each in holdings.parameters:
            yield rank, each.name, (each.dtype, each.whole), (each.offset, each.shape)
