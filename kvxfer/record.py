"""What worker, registry, REST API and client say to each other, each said once.

A record is a msgspec Struct, which costs little to make, to compare and to encode. Its annotations
are all there is to know about it: the type of a member, its bounds (`msgspec.Meta`), what it means
(the text below it) and an example. FastAPI takes and answers records as they are, checks them by
these bounds and describes them in the OpenAPI schema; decoders of msgspec check by them, too. A
record that is made in Python is not checked, but for what its `__post_init__` refuses.
"""

from __future__ import annotations

from contextvars import ContextVar
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

# Only a server of the REST API has pydantic: a worker is spared its import.
if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A Struct that FastAPI can take and answer."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from kvxfer.record_schema import record_schema

        return record_schema(cls, handler)


class Word(StrEnum):
    """Words that a later version may have more of: lenient() decoding reads those as `unknown`,
    which is none of the members. All other decoding refuses them."""

    @classmethod
    def _missing_(cls, value: object) -> Word | None:  # noqa: ARG003
        return _unknown(cls) if _lenient.get() else None

    @property
    def known(self) -> bool:
        """Whether this version has the word."""
        return self.name in type(self).__members__


@cache
def _unknown(cls: type[Word]) -> Word:
    word = str.__new__(cls, "unknown")
    word._name_, word._value_ = "UNKNOWN", "unknown"
    return word


_lenient: Final = ContextVar("lenient", default=False)


def lenient(content: bytes, kind: type[T]) -> T:
    """What a newer version may have said, as far as this one knows it. Raises UNREADABLE."""
    before = _lenient.set(True)
    try:
        return msgspec.json.decode(content, type=kind)
    finally:
        _lenient.reset(before)


def at_api(**bounds: Any) -> msgspec.Meta:
    """Bounds, named as those of `Meta`, that the REST API alone checks: between engines, what is
    beyond them is refused by the name of what it cannot be, and the connection stays."""
    return msgspec.Meta(extra={"at_api": bounds})


class HexInt:
    """Marks an integer of 64 bits that is text of 16 hexadecimal digits in JSON, which has no
    numbers of that size."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        from kvxfer.record_schema import hex_schema

        return hex_schema()
