"""The page at `/`: the current activity, in a browser. Static files from the package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from kvxfer.api.access import GuardedRoute, public

router = APIRouter(route_class=GuardedRoute, include_in_schema=False)

FOLDER: Final = Path(__file__).resolve().parent.parent / "page"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing inline, nothing from elsewhere: a name of an instance is never more than text.
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


@router.get("/")
@public
async def index(request: Request) -> Response:
    return _answer(request, "index.html")


@router.get("/page/{name:path}")
@public
async def file(name: str, request: Request) -> Response:
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise HTTPException(404)
    headers = {**HEADERS, "ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@cache
def _files() -> dict[str, _File]:
    """Returns the files of the page, by name; they are read once."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        media_type = _MEDIA_TYPES.get(path.suffix)
        if media_type is not None:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(FOLDER).as_posix()] = _File(content, media_type, etag)
    return found
