"""The body of every error: a problem document (RFC 9457)."""

from __future__ import annotations

from dataclasses import fields
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from kvxfer.layout import KvLayout
from kvxfer.model_identity import FIELDS as MODEL_FIELDS

_COMPARED: Final = [
    "model",
    "fabrics",
    "kv_versions",
    *MODEL_FIELDS,
    *(field.name for field in fields(KvLayout)),
]


class InvalidMember(BaseModel):
    """One error in a request."""

    location: str = Field(description="`body`, `query`, `path` or `header`.")
    field: str = Field(description="Dotted path of the member, for example `layout.block_size`.")
    message: str


class _Problem(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str = Field(description="`urn:kvxfer:error:` and the code.")
    title: str
    status: int
    detail: str
    instance: str = Field(description="Path of the request that failed.")
    request_id: str | None = Field(
        None, description="The X-Request-ID of the request, as in the logs."
    )


class Problem(_Problem):
    """A problem document (RFC 9457): what went wrong, with whom, and what to do about it.

    `code` is the stable name to program against. Some codes have further members: `reasons` of
    no-capacity; `errors` of invalid-argument; `instance_id`, `epoch` and `lease_remaining_seconds`
    of instance-exists.
    """

    code: str
    field: str | None = Field(None, description="The member at fault, if it is one.")
    errors: list[InvalidMember] | None = None
    reasons: list[str] | None = None


class LayoutMismatchProblem(_Problem):
    """Two instances cannot transfer to each other (RFC 9457)."""

    code: Literal["layout-mismatch"]
    field: str = Field(
        description="The first field of instance, model or layout that cannot be mapped.",
        json_schema_extra={"enum": [*_COMPARED]},
    )
    prefill: JsonValue = Field(description="The field's value at prefill.")
    decode: JsonValue = Field(description="The field's value at decode.")
