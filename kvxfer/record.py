"""The base of the records that worker, registry, REST API and client exchange.

A record is a msgspec Struct, which is cheap to make, compare and encode. Its annotations define it
completely: the type of a member, its bounds (`msgspec.Meta`), its meaning (the text below it) and
an example. FastAPI accepts and returns records, checks their bounds and describes them in the
OpenAPI schema; msgspec's decoders check the bounds too. A record made in Python is checked only by
its `__post_init__`.
"""

from __future__ import annotations

from contextvars import ContextVar
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

# Only a server of the REST API imports pydantic; a worker does not need it.
if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A Struct that FastAPI can accept and return."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from kvxfer.record_schema import record_schema

        return record_schema(cls, handler)


class Word(StrEnum):
    """A set of words that a later version may extend. lenient() decodes an unknown word as
    `unknown`, which is not a member; all other decoding refuses it."""

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
    """Decodes what a newer version may have sent, as far as this one knows it. Raises
    UNREADABLE."""
    before = _lenient.set(True)
    try:
        return msgspec.json.decode(content, type=kind)
    finally:
        _lenient.reset(before)


def at_api(**bounds: Any) -> msgspec.Meta:
    """Returns bounds, named as those of `Meta`, that only the REST API checks. Between engines a
    value beyond them is refused with an error that names it, and the connection stays."""
    return msgspec.Meta(extra={"at_api": bounds})


class HexInt:
    """A marker of 64-bit integers that are 16 hexadecimal digits in JSON, which has no numbers of
    that size."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        from kvxfer.record_schema import hex_schema

        return hex_schema()
