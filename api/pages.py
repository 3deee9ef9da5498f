"""Lists in pages. The Link header of a page (RFC 8288) has the address of the next one."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from fastapi import Header, Query, Request, Response

from kvxfer.errors import InvalidArgument
from kvxfer.unreadable import UNREADABLE

Cursor: TypeAlias = Annotated[
    str | None,
    Query(max_length=512, description="The page's cursor, from the previous page's Link header."),
]
IfNoneMatch: TypeAlias = Annotated[
    str | None, Header(max_length=1024, description="The ETag of an earlier answer.")
]

LINK: Final[dict[str, Any]] = {
    "Link": {
        "description": 'The next page, `<…>; rel="next"`; absent on the last one.',
        "schema": {"type": "string"},
    }
}
ETAG: Final[dict[str, Any]] = {
    "ETag": {
        "description": "A weak tag, the same on every replica.",
        "schema": {"type": "string"},
    }
}
_TAG_BYTES: Final = 12

T = TypeVar("T")
K = TypeVar("K")


def position(cursor: str | None, kind: type[K]) -> K | None:
    """Returns the key of the last item before the page; None for the first page. Raises
    InvalidArgument."""
    if cursor is None:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=kind)
    except (*UNREADABLE, binascii.Error, ValueError):
        raise InvalidArgument(
            "cursor: no page begins there; take it from the Link header of the previous page"
        ) from None


def take(
    items: Iterable[T], limit: int, key: Callable[[T], object]
) -> tuple[tuple[T, ...], object | None]:
    """Returns the first items, and the key of the last one of them if others follow."""
    found = tuple(islice(items, limit + 1))
    return found[:limit], key(found[limit - 1]) if len(found) > limit else None


def tag(*parts: object) -> str:
    """Returns the weak ETag of an answer that means the same as long as `parts` are the same."""
    digest = hashlib.blake2b(msgspec.json.encode(parts), digest_size=_TAG_BYTES)
    return f'W/"{digest.hexdigest()}"'


def answer(
    request: Request, page: msgspec.Struct, *, last: object | None, etag: str | None = None
) -> Response:
    """Returns the page, or 304 if the client has it. `last`: as take() returns it."""
    headers = {} if etag is None else {"ETag": etag}
    if last is not None:
        cursor = base64.urlsafe_b64encode(msgspec.json.encode(last)).decode()
        following = request.url.include_query_params(cursor=cursor)
        headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'
    if etag is not None and _matches(request.headers.get("If-None-Match", ""), etag):
        return Response(status_code=304, headers=headers)
    # Records are known to be valid; pydantic would take long, and delay all other requests.
    content = msgspec.json.encode(page)
    return Response(content, headers=headers, media_type="application/json")


def _matches(header: str, etag: str) -> bool:
    """Whether a tag of the header matches, by the weak comparison of RFC 9110."""
    tags = {each.strip().removeprefix("W/") for each in header.split(",")}
    return "*" in tags or etag.removeprefix("W/") in tags
