"""What worker, registry, REST API and client say to each other, each said once.

A record is a msgspec Struct, which costs little to make, to compare and to encode. Its annotations
are all there is to know about it: the type of a member, its bounds (`msgspec.Meta`), what it means
(the text below it) and an example. FastAPI takes and answers records as they are, checks them by
these bounds and describes them in the OpenAPI schema; decoders of msgspec check by them, too. A
record that is made in Python is not checked, but for what its `__post_init__` refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

# Only a server of the REST API has pydantic: a worker is spared its import.
if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A Struct that FastAPI can take and answer."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from kvxfer.record_schema import record_schema

        return record_schema(cls, handler)


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
