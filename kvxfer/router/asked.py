"""A request as the router sends it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvxfer.errors import InvalidArgument, KvxferError, NotAggregating
from kvxfer.prefix_hashes import NO_HASHES, AskedHashes
from kvxfer.router.bodies import NO_MEMBERS, Members, is_on, read_members, value_of
from kvxfer.router.dialects import Dialect
from kvxfer.web.request_log import is_request_id

_JSON: Final = "application/json"
_MODEL_LENGTH: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to the route of a dialect."""

    request_id: str
    dialect: Dialect
    path: str
    """The path and the query, here and at the workers."""
    method: str = "POST"
    content: bytes
    """The body as received."""
    content_type: str = _JSON
    members: Members = field(default_factory=dict, repr=False)
    """The members of the body; empty if it is no JSON object."""
    model: str | None
    """The model; None if the request names none."""
    alone: str
    """The member or route that requires one worker alone; empty if a pair can serve it."""
    lacks: str = ""
    """The required member that is missing; "body" if that is no JSON object."""
    streams: bool
    """Whether the client wants a stream."""
    prompt_tokens: int | None = None
    """The prompt's tokens as far as known; an estimate if a text was not tokenized in time."""
    text_bytes: int = 0
    """The bytes of the prompt's text that `prompt_tokens` does not count yet."""
    ids: list[int] | None = None
    """The prompt's tokens, if the client sent them."""
    prefix: AskedHashes = NO_HASHES
    """The hashes of the prompt, if its tokens are known."""
    rendered: msgspec.Raw | None = None
    """The tokens of the prompt as one worker has rendered it, for both workers."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The client's headers that the workers get."""
    tenant: str | None = None
    """The name of the client's API key."""
    arrived: float
    """The time of arrival by the router's monotonic clock."""

    @property
    def priority(self) -> int:
        """vLLM's `priority`, the lowest first; 0 if it is missing or not in -1000 to 1000."""
        value = value_of(self.members, "priority")
        return value if type(value) is int and -1000 <= value <= 1000 else 0

    def not_by_a_pair(self, refusal: NotAggregating) -> KvxferError:
        """Returns the error for the client if no worker serves the request alone."""
        if self.lacks:
            what = "not a JSON object" if self.lacks == "body" else "missing"
            return InvalidArgument(f"{self.lacks}: {what}; {self.path} needs it", param=self.lacks)
        return NotAggregating(
            f"{self.alone}: a pair of workers cannot compute this, and {refusal}", param=self.alone
        )


def read_request(
    dialect: Dialect,
    content: bytes,
    *,
    request_id: str,
    named: bool = True,
    path: str = "",
    method: str = "POST",
    content_type: str = _JSON,
    headers: Mapping[str, str] | None = None,
    tenant: str | None = None,
    arrived: float = 0.0,
) -> Asked:
    """Reads a request. Raises InvalidArgument for a body that no worker may see.

    `named`: the client has chosen `request_id`; otherwise `request_id` of the body replaces it.
    """
    json = content_type.partition(";")[0].strip().lower() in ("", _JSON)
    read = read_members(content) if json else None
    members = NO_MEMBERS if read is None else read
    if value_of(members, "kv_transfer_params") is not None:
        raise InvalidArgument(
            "kv_transfer_params: the router makes them; leave them out", param="kv_transfer_params"
        )
    model, own_id = value_of(members, "model"), value_of(members, "request_id")
    if not (isinstance(model, str) and 0 < len(model) <= _MODEL_LENGTH):
        model = None
    if not named and isinstance(own_id, str) and is_request_id(own_id):
        request_id = own_id
    lacks = dialect.lacks(read)
    prompt = dialect.prompt(members)
    return Asked(
        request_id=request_id,
        dialect=dialect,
        path=path or dialect.path,
        method=method,
        content=content,
        content_type=content_type,
        members=members,
        model=model,
        # A worker refuses an invalid body in its own words.
        alone=lacks or dialect.alone(members),
        lacks=lacks,
        streams=is_on(value_of(members, "stream")),
        prompt_tokens=len(prompt.ids or ()) + prompt.more or None,
        text_bytes=prompt.nbytes if prompt.ids is None else 0,
        ids=prompt.ids,
        headers=headers or {},
        tenant=tenant,
        arrived=arrived,
    )
