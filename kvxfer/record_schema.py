"""The schemas of the records of `kvxfer.record` for pydantic, and so for FastAPI and OpenAPI."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import reduce
from operator import or_
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from kvxfer.docstrings import docstrings

_BOUNDS: Final = ("ge", "gt", "le", "lt", "multiple_of", "pattern", "min_length", "max_length")
_SAYS: Final = ("description", "examples")
_PLAIN: Final[dict[Any, object]] = {bool: False, int: 1, float: 1.0}

ignored: Final[ContextVar[set[str] | None]] = ContextVar("ignored", default=None)
"""The names of unknown members that records have ignored."""


class _Member(NamedTuple):
    name: str
    type: Any
    required: bool
    default: Any = None


def record_schema(cls: type, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Returns the schema of a record or dataclass. It checks an object with the members and makes
    an instance of it; an instance is taken as it is."""
    texts = docstrings(cls)
    tag_field, tag = _tag(cls)
    fields = {
        member.name: core_schema.typed_dict_field(
            handler.generate_schema(_for_pydantic(member.type)),
            required=member.required,
            metadata={"pydantic_js_updates": dict(_says(member, texts))},
        )
        for member in _members(cls)
    }
    if tag_field:
        literal = core_schema.literal_schema([tag])
        fields = {tag_field: core_schema.typed_dict_field(literal, required=True), **fields}
    says = {
        "title": cls.__name__,
        "description": _as_json_says(inspect.cleandoc(cls.__doc__ or "")),
        "examples": [example(cls)],
    }
    members = core_schema.typed_dict_schema(
        fields,
        extra_behavior="forbid" if _is_strict(cls) else "ignore",
        metadata={"pydantic_js_updates": says},
    )

    def made(value: Any, check: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, cls):
            return value
        given = check(value)
        given.pop(tag_field, None)
        left_out = ignored.get()
        if left_out is not None and isinstance(value, Mapping):
            left_out.update(str(name) for name in value.keys() - fields.keys())
        return cls(**given)

    return core_schema.no_info_wrap_validator_function(
        made,
        members,
        ref=f"{cls.__module__}.{cls.__qualname__}:{id(cls)}",
        serialization=core_schema.plain_serializer_function_ser_schema(msgspec.to_builtins),
    )


def hex_schema() -> CoreSchema:
    """Returns the schema of integers that HexInt marks."""
    digits = core_schema.str_schema(pattern="^[0-9a-f]{16}$")
    return core_schema.no_info_after_validator_function(lambda text: int(text, 16), digits)


def parameter(kind: Any) -> dict[str, Any]:
    """Returns the arguments of fastapi.Path or Query for a parameter of an annotated type."""
    metas = (note for note in get_args(kind)[1:] if isinstance(note, msgspec.Meta))
    return {name: value for meta in metas for name, value in _given(meta).items()}


def example(kind: Any) -> Any:
    """Returns an example of this type in JSON: from the examples in annotations, then from
    defaults. Raises TypeError if a text has neither."""
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        shown = _examples(notes)
        return shown[-1] if shown else example(base)
    if _has_members(kind):
        tag_field, tag = _tag(kind)
        first = {tag_field: tag} if tag_field else {}
        return first | {member.name: _member_example(kind, member) for member in _shown(kind)}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return example(arguments[0])
    if origin is tuple:
        return [example(item) for item in arguments if item is not Ellipsis]
    if origin is Literal:
        return arguments[0]
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return next(iter(kind)).value
    if kind in _PLAIN:
        return _PLAIN[kind]
    raise TypeError(f"there is no example of {kind}; give one in msgspec.Meta")


def _shown(cls: type) -> Iterator[_Member]:
    return (member for member in _members(cls) if member.default is not msgspec.UNSET)


def _member_example(cls: type, member: _Member) -> Any:
    if not member.required and not _has_example(member.type):
        return msgspec.to_builtins(member.default)
    try:
        return example(member.type)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}.{member.name}: {error}") from None


def _has_example(kind: Any) -> bool:
    return get_origin(kind) is Annotated and bool(_examples(get_args(kind)))


def _examples(notes: Iterable[object]) -> list[Any]:
    """Returns the examples; the last one is nearest to the member."""
    return [note.examples[0] for note in notes if isinstance(note, msgspec.Meta) and note.examples]


def _members(cls: type) -> Iterator[_Member]:
    kinds = get_type_hints(cls, include_extras=True)
    fields: tuple[Any, ...] = (
        dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else msgspec.structs.fields(cls)
    )
    absent = (dataclasses.MISSING, msgspec.NODEFAULT)
    for field in fields:
        if field.default not in absent:
            yield _Member(field.name, kinds[field.name], False, field.default)
        elif field.default_factory not in absent:
            yield _Member(field.name, kinds[field.name], False, field.default_factory())
        else:
            yield _Member(field.name, kinds[field.name], True)


def _has_members(kind: Any) -> bool:
    return inspect.isclass(kind) and (
        issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
    )


def _says(member: _Member, texts: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    if member.name in texts:
        yield "description", _as_json_says(texts[member.name])
    if not member.required and member.default is not msgspec.UNSET:
        yield "default", msgspec.to_builtins(member.default)


def _as_json_says(text: str) -> str:
    return re.sub(r"\bNone\b", "null", text)


def _tag(cls: type) -> tuple[str, Any]:
    config = getattr(cls, "__struct_config__", None)
    return ("", None) if config is None or config.tag is None else (config.tag_field, config.tag)


def _is_strict(cls: type) -> bool:
    config = getattr(cls, "__struct_config__", None)
    return config is not None and config.forbid_unknown_fields


def _from_base64(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"it is not base64 (RFC 4648): {error}") from None


_BASE64: Final = Annotated[
    bytes,
    BeforeValidator(_from_base64),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]


class _Members:
    """A marker of a Struct or dataclass that is not a Record."""

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return record_schema(kind, handler)


def _for_pydantic(kind: Any) -> Any:
    """Returns the type with msgspec's annotations replaced by pydantic's."""
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        base = _for_pydantic(base)
        for note in notes:
            said = Field(**_given(note)) if isinstance(note, msgspec.Meta) else note
            base = Annotated[base, said]
        return base
    if _has_members(kind):
        return Annotated[kind, _Members]
    if kind is float:
        return Annotated[float, Field(allow_inf_nan=False)]
    if kind is bytes:
        return _BASE64
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return reduce(
            or_, [_for_pydantic(each) for each in arguments if each is not msgspec.UnsetType]
        )
    if origin is None or origin is Literal:
        return kind
    return origin[tuple(each if each is ... else _for_pydantic(each) for each in arguments)]


def _given(meta: msgspec.Meta) -> dict[str, Any]:
    said = {name: getattr(meta, name) for name in (*_BOUNDS, *_SAYS)}
    said |= (meta.extra or {}).get("at_api", {})
    return {name: value for name, value in said.items() if value is not None}
