"""The router's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from kvxfer.errors import InvalidArgument
from kvxfer.settings import Seconds, check_bounds
from kvxfer.watched_file import WatchedFile

if TYPE_CHECKING:
    from kvxfer.web.tokens import Tokens

Handshake: TypeAlias = Literal["direct", "brokered"]

_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")  # RFC 9110
_OWN_HEADERS: Final = frozenset(
    {
        *("authorization", "connection", "content-length", "content-type", "expect", "host"),
        *("te", "trailer", "transfer-encoding", "traceparent", "tracestate", "upgrade"),
        *("keep-alive", "proxy-authorization", "proxy-connection", "x-request-id"),
    }
)


def watch_worker_key(path: Path) -> WatchedFile[str]:
    """Returns the key of a file, read again when it changes. Raises InvalidArgument."""
    return WatchedFile("worker key file", path, _parse_worker_key)


def _parse_worker_key(content: bytes) -> str:
    key = content.decode(errors="replace").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise InvalidArgument("the worker key file has no key; write the key that workers require")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The settings of a router. Raises InvalidArgument for an invalid value."""

    api_keys: WatchedFile[Tokens] | None = field(default=None, repr=False)
    """The API keys of clients; None serves every client."""
    worker_key: WatchedFile[str] | None = field(default=None, repr=False)
    """The key that workers require, as `vllm serve --api-key`; None sends none."""
    forward_headers: tuple[str, ...] = ()
    """Headers of a client's request that workers get unchanged."""
    handshake: Handshake = "direct"
    """The way of block tables to prefill: from decode's engine, or through the control plane."""
    attempts: Annotated[int, Meta(ge=1, le=64)] = 4  # `avoid` of POST /v1/transfers takes 64
    """The most pairs that a request is tried on."""
    first_token_seconds: Seconds = 30.0
    """The longest time from a request's arrival to its first token, over all attempts."""
    capacity_seconds: Seconds = 30.0
    """The longest total wait of a request for a pair with room, before it gets a 503."""
    token_seconds: Seconds = 30.0
    """A stream whose worker sends nothing for this long is given up. A worker that computes an
    answer in one piece is asked at this interval whether it is alive."""
    answer_seconds: Seconds = 600.0
    """The longest time from a request's arrival at a worker to the end of an answer in one piece.
    """
    client_seconds: Seconds = 60.0
    """A client that takes no token for this long is given up, and its request with it."""
    stop_seconds: Annotated[int, Meta(ge=0)] = 30
    """The longest time that requests under way may go on after the router is told to stop."""
    pairs_only: bool = False
    """A request that no pair of ready workers could serve (no prefill worker, no decode worker, or
    one worker of both roles is the whole fleet) gets a 503, instead of one worker."""
    continue_streams: bool = False
    """A stream whose decode worker is lost goes on at another one, once: the prompt and the tokens
    so far are computed again unless they are cached."""
    priorities: bool = False
    """Whether `priority` of a client's request, vLLM's, also orders requests that wait for a pair.
    """
    max_requests: Annotated[int, Meta(ge=1)] = 1024
    """The most requests under way, counted before their bodies are read; more get a 503."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 4 << 20
    """The largest body of a request, in bytes."""
    max_held_bytes: Annotated[int, Meta(ge=1)] = 256 << 20
    """The most bytes of the bodies of all requests under way; a request beyond them gets a 503."""
    tokenize_seconds: Annotated[float, Meta(ge=0)] = 0.05
    """The longest wait of a text prompt for a worker to tokenize it; the tokens show where it is
    cached. 0 asks no worker."""
    render_seconds: Annotated[float, Meta(ge=0)] = 2.0
    """The longest wait of a chat for one worker to render it for both; with 0, each renders it."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the router (CORS), `*` for all."""

    def headers_for_workers(self) -> dict[str, str]:
        """Returns the headers that workers require."""
        if self.worker_key is None:
            return {}
        return {"Authorization": f"Bearer {self.worker_key.current}"}

    def __post_init__(self) -> None:
        check_bounds(self)
        for header in self.forward_headers:
            if header.lower() in _OWN_HEADERS:
                raise InvalidArgument(
                    f"the header {header} of a client cannot be forwarded, as the router sends "
                    "workers its own; leave it out"
                )
            if not _HEADER.fullmatch(header):
                raise InvalidArgument(f"{header!r} is no name of a header; use one like X-Tenant")
