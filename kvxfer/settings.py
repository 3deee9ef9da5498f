"""Settings: dataclasses or structs that state the bounds of each member with `msgspec.Meta`.

`check_bounds` refuses values of another type or beyond the bounds, `read` takes values from JSON
and text, and the command line makes its options from the same annotations (`kvxfer.cli.options`).
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from types import NoneType, SimpleNamespace, UnionType
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
    "min_length": (operator.ge, "{} or more"),
    "max_length": (operator.le, "{} or less"),
}
_WORDS: Final = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_TYPES: Final = {str: (str,), int: (int,), float: (int, float), bool: (bool,)}


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


def check_bounds(settings: Any, prefix: str = "") -> None:
    """Raises InvalidArgument that names, after `prefix`, the first member of another type or beyond
    its bounds. None is within bounds unless there are choices without it."""
    cls: type = type(settings)
    for name, member in members(cls).items():
        _check(getattr(settings, name), member, prefix + name)


def _check(value: Any, member: Member, called: str) -> None:
    if value is None and get_origin(member.type) is not Literal:
        return
    kind = _but_none(member.type)
    if get_origin(kind) is Literal and value not in get_args(kind):
        choices = " or ".join(map(str, get_args(kind)))
        raise InvalidArgument(f"{called} is {value!r}; use {choices}")
    if kind in _TYPES and not (
        isinstance(value, _TYPES[kind]) and isinstance(value, bool) is (kind is bool)
    ):
        raise InvalidArgument(f"{called} is {value!r}; use {_WORDS[kind]}")
    for bound, limit in member.bounds():
        holds, words = _HOLDS[bound]
        sized = bound.endswith("_length")
        if not holds(len(value) if sized else value, limit):  # NaN is within no bounds
            found = f"has a length of {len(value)}" if sized else f"is {value!r}"
            raise InvalidArgument(f"{called} {found}; use {words.format(limit)}")


def read_members(
    cls: type, given: Mapping[str, object], setting: Callable[[str], str], *, text: bool = False
) -> dict[str, Any]:
    """Returns the members of settings that are in `given`, as `read` does. None, and empty text,
    count as left out. `setting` returns the operator's name for a member."""
    known = members(cls)
    return {
        name: read(value, known[name], setting(name), text=text)
        for name, value in given.items()
        if value is not None and not (text and value == "")
    }


def read(value: Any, member: Member, called: str, *, text: bool = False) -> Any:
    """Returns the value of a member from JSON or, with `text`, from text, in which lists have
    commas between their items. Raises InvalidArgument, which names the setting as `called`."""
    kind = _but_none(member.type)
    listed = get_origin(kind) is Sequence
    taken = value
    if text and listed:
        taken = [part for part in map(str.strip, value.split(",")) if part]
    elif text:
        taken = value.strip()
    try:
        taken = msgspec.convert(taken, kind, strict=not text)
    except msgspec.ValidationError:
        takes = f"a list, each item {_WORDS[get_args(kind)[0]]}" if listed else _WORDS[kind]
        raise InvalidArgument(f"{called} is {value!r}; pass {takes}") from None
    _check(taken, member, called)
    return taken


def _but_none(kind: Any) -> Any:
    """Returns the type without None."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    return reduce(operator.or_, [each for each in get_args(kind) if each is not NoneType])


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
        home = next(e for e in cls.__mro__ if field.name in vars(e).get("__annotations__", ()))
        # One at a time, so that a name that is not imported leaves out its member only.
        one = SimpleNamespace(__annotations__={field.name: field.type})
        try:
            kinds = get_type_hints(one, vars(sys.modules[home.__module__]), include_extras=True)
        except NameError:
            continue
        found[field.name] = member_of(kinds[field.name])
    return found


def member_of(kind: Any) -> Member:
    """Returns the member that has this annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        base, *notes = arguments
        inner = member_of(base)
        return Member(inner.type, (*inner.notes, *notes))
    if origin in (Union, UnionType):
        parts = [member_of(each) for each in arguments]
        return Member(
            reduce(operator.or_, [part.type for part in parts]),
            tuple(note for part in parts for note in part.notes),
        )
    return Member(kind, ())
