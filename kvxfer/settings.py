"""Settings: dataclasses or structs that state the bounds of each member with `msgspec.Meta`.

`check_bounds` refuses values beyond them, and the command line makes its options from the same
annotations (`kvxfer.cli.options`).
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from types import SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from kvxfer.errors import InvalidArgument

Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]

_HOLDS: Final = {
    "gt": (operator.gt, "more than {}"),
    "ge": (operator.ge, "{} or more"),
    "lt": (operator.lt, "less than {}"),
    "le": (operator.le, "{} or less"),
}


class Member(NamedTuple):
    """A member's type without notes, and the notes that `Annotated` adds to it."""

    type: Any
    notes: tuple[object, ...]

    def bounds(self) -> Iterator[tuple[str, float]]:
        """Yields each bound, by its name in `msgspec.Meta`, and its limit."""
        for note in self.notes:
            if isinstance(note, msgspec.Meta):
                for name in _HOLDS:
                    if (limit := getattr(note, name)) is not None:
                        yield name, limit


def check_bounds(settings: Any) -> None:
    """Raises InvalidArgument that names the first member beyond its bounds. None is always within
    bounds."""
    cls: type = type(settings)
    for name, member in members(cls).items():
        value = getattr(settings, name)
        if get_origin(member.type) is Literal and value not in get_args(member.type):
            choices = " or ".join(map(str, get_args(member.type)))
            raise InvalidArgument(f"{name} is {value}; use {choices}")
        for bound, limit in member.bounds():
            holds, words = _HOLDS[bound]
            if value is not None and not holds(value, limit):  # NaN is within no bounds
                raise InvalidArgument(f"{name} is {value}; use {words.format(limit)}")


def fields(cls: Any) -> tuple[Any, ...]:
    """Returns the fields of a dataclass or a struct; each has a name, a type and a default."""
    return (
        msgspec.structs.fields(cls) if issubclass(cls, msgspec.Struct) else dataclasses.fields(cls)
    )


@cache
def members(cls: Any) -> Mapping[str, Member]:
    """Returns the members of settings by name, without those whose type only type checkers
    import."""
    found = {}
    for field in fields(cls):
        # One at a time, so that a name that is not imported leaves out its member only.
        one = SimpleNamespace(__annotations__={field.name: field.type})
        try:
            kinds = get_type_hints(one, vars(sys.modules[cls.__module__]), include_extras=True)
        except NameError:
            continue
        found[field.name] = _member(kinds[field.name])
    return found


def _member(kind: Any) -> Member:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        base, *notes = arguments
        inner = _member(base)
        return Member(inner.type, (*inner.notes, *notes))
    if origin in (Union, UnionType):
        parts = [_member(each) for each in arguments]
        return Member(
            reduce(operator.or_, [part.type for part in parts]),
            tuple(note for part in parts for note in part.notes),
        )
    return Member(kind, ())
