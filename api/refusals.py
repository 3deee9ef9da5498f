"""The errors of the HTTP API that refuses a request before it reaches the registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from fastapi.exceptions import RequestValidationError

from kvxfer.errors import (
    BlockTableMismatch,
    Forbidden,
    InvalidArgument,
    NotBuilt,
    RateLimited,
    Unauthenticated,
)
from kvxfer.web.tokens import Caller, Scope


def invalid(error: RequestValidationError) -> InvalidArgument:
    """Returns an error that names the first member at fault, and has all in `errors`."""
    errors = [_member(item) for item in error.errors()]
    first = errors[0]
    detail = f"{first['field']}: {first['message']}" if first["field"] else first["message"]
    if len(errors) > 1:
        detail += f" (and {len(errors) - 1} more, see errors)"
    return InvalidArgument(detail, field=first["field"], errors=errors)


def no_token() -> Unauthenticated:
    return Unauthenticated(
        "the control plane takes a bearer token, and this request has none; name the file "
        "with your token in KVXFER_TOKEN_FILE, or send `Authorization: Bearer TOKEN`"
    )


def unknown_token() -> Unauthenticated:
    return Unauthenticated(
        "the control plane does not know this token; ask its operator for a new one",
        invalid_token=True,
    )


def wrong_scope(method: str, path: str, scopes: Iterable[Scope], caller: Caller) -> Forbidden:
    """Refuses a caller who has none of the route's scopes."""
    return Forbidden(
        f"{method} {path} takes a token with scope {' or '.join(sorted(scopes))}; that of "
        f"{caller.name!r} has {', '.join(sorted(caller.scopes))}",
        scopes=sorted(scopes),
    )


def too_many_requests(who: str, seconds: float) -> RateLimited:
    return RateLimited(
        f"too many requests from {who}; retry in {seconds:.3f} s",
        retry_after_seconds=round(seconds, 3),
    )


def block_table_of_another(transfer_id: str, sent_for: str) -> BlockTableMismatch:
    return BlockTableMismatch(
        f"the block table is of transfer {transfer_id!r}, and was sent for {sent_for!r}",
        transfer_id=sent_for,
    )


def takes_no_traces() -> NotBuilt:
    return NotBuilt(
        "this control plane takes no traces: OpenTelemetry is not installed there; "
        "pip install 'kvxfer[otel]'"
    )


def _member(item: Mapping[str, Any]) -> dict[str, str]:
    location, *path = cast(Sequence[str | int], item["loc"])
    if item["type"] == "json_invalid":
        cause = item.get("ctx", {}).get("error", "")
        return {
            "location": "body",
            "field": "",
            "message": f"the body is not JSON: {cause} at character {path[0] if path else 0}",
        }
    return {
        "location": str(location),
        "field": ".".join(str(part) for part in path),
        "message": str(item["msg"]).removeprefix("Value error, "),
    }
