"""Settings: dataclasses or structs that state the bounds of each member with `msgspec.Meta`.

`check_bounds` refuses values of another type or beyond the bounds, `read` takes values from JSON
and text, and the command line makes its options from the same annotations (`kvxfer.cli.options`).
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, reduce
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
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


@dataclasses.dataclass(frozen=True)
class Member:
    """A member's type without notes, and the notes that `Annotated` adds to it."""

    type: Any
    notes: tuple[object, ...]

    @cached_property
    def kind(self) -> Any:
        """The type without None."""
        if get_origin(self.type) not in (Union, UnionType):
            return self.type
        return reduce(operator.or_, [e for e in get_args(self.type) if e is not NoneType])

    @cached_property
    def bounds(self) -> Sequence[tuple[str, float]]:
        """Each bound, by its name in `msgspec.Meta`, and its limit."""
        return [
            (name, limit)
            for note in self.notes
            if isinstance(note, msgspec.Meta)
            for name in _HOLDS
            if (limit := getattr(note, name)) is not None
        ]

    @cached_property
    def _limits(self) -> Sequence[tuple[Callable[[Any, float], bool], float, bool, str]]:
        """The comparison of each bound, its limit, whether it bounds the length, and its words."""
        return [
            (holds, limit, name.endswith("_length"), words)
            for name, limit in self.bounds
            for holds, words in [_HOLDS[name]]
        ]

    @cached_property
    def _types(self) -> tuple[type, ...] | None:
        return _TYPES.get(self.kind)

    @cached_property
    def _choices(self) -> Sequence[object] | None:
        return get_args(self.kind) if get_origin(self.kind) is Literal else None

    def check(self, value: Any, called: str) -> None:
        """Raises InvalidArgument that names the member as `called`, if the value is of another type
        or beyond a bound. None is within bounds unless there are choices without it."""
        if value is None and get_origin(self.type) is not Literal:
            return
        kind = self.kind
        if self._choices is not None and value not in self._choices:
            choices = " or ".join(map(str, self._choices))
            raise InvalidArgument(f"{called} is {value!r}; use {choices}")
        # Most values are of the type itself.
        if type(value) is not kind and self._types and not _is_any(value, self._types):
            raise InvalidArgument(f"{called} is {value!r}; use {_WORDS[kind]}")
        for holds, limit, sized, words in self._limits:
            if not holds(len(value) if sized else value, limit):  # NaN is within no bounds
                found = f"has a length of {len(value)}" if sized else f"is {value!r}"
                raise InvalidArgument(f"{called} {found}; use {words.format(limit)}")


def _is_any(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def check_bounds(settings: Any, prefix: str = "") -> None:
    """Raises InvalidArgument that names, after `prefix`, the first member of another type or beyond
    its bounds."""
    cls: type = type(settings)
    for name, member in members(cls).items():
        member.check(getattr(settings, name), prefix + name)


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
    kind = member.kind
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
    member.check(taken, called)
    return taken


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
