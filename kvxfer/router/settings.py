"""What an operator can set about the router."""

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
    """The key of a file, whatever is put into it later. Raises InvalidArgument."""
    return WatchedFile("worker key file", path, _parse_worker_key)


def _parse_worker_key(content: bytes) -> str:
    key = content.decode(errors="replace").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise InvalidArgument("the worker key file has no key; write the one that workers ask for")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Raises InvalidArgument where a value cannot be meant."""

    api_keys: WatchedFile[Tokens] | None = field(default=None, repr=False)
    """Of the router's clients; None serves everybody."""
    worker_key: WatchedFile[str] | None = field(default=None, repr=False)
    """What workers ask for, as `vllm serve --api-key`; None sends none."""
    forward_headers: tuple[str, ...] = ()
    """Of a client's request, which workers get as they are."""
    handshake: Handshake = "direct"
    """How block tables get to prefill: from decode's engine, or by the control plane."""
    attempts: Annotated[int, Meta(ge=1, le=64)] = 4  # `avoid` of POST /v1/transfers takes 64
    """Pairs that a request may be tried on."""
    first_token_seconds: Seconds = 30.0
    """From a request's arrival to its first token, with all attempts."""
    capacity_seconds: Seconds = 30.0
    """A request waits so long in all for a pair with room before it is a 503."""
    token_seconds: Seconds = 30.0
    """A stream whose worker sends nothing for so long is given up. A worker that computes an answer
    in one piece is asked as often whether it is alive."""
    answer_seconds: Seconds = 600.0
    """From a request's arrival at a worker to the end of an answer in one piece."""
    client_seconds: Seconds = 60.0
    """A client that takes no token for so long is given up, and its request with it."""
    stop_seconds: Annotated[int, Meta(ge=0)] = 30
    """Told to stop, it lets requests under way go on for so long."""
    pairs_only: bool = False
    """Where no pair of ready workers could serve a request (no prefill worker, no decode worker, or
    one of both roles is all there is), it is a 503, and not one worker's."""
    continue_streams: bool = False
    """A stream whose decode worker is lost goes on at another one, once: the prompt and the tokens
    so far are computed again where they are not cached."""
    priorities: bool = False
    """Whether `priority` of a client's request, vLLM's, also says who waits for a pair."""
    max_requests: Annotated[int, Meta(ge=1)] = 1024
    """Under way at once, from before their bodies are read; the next one is a 503."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 4 << 20
    """Of a request."""
    max_held_bytes: Annotated[int, Meta(ge=1)] = 256 << 20
    """Bodies of all requests under way; beyond it a request is a 503."""
    tokenize_seconds: Annotated[float, Meta(ge=0)] = 0.05
    """A text prompt waits so long for a worker to say its tokens, which tell where they are cached;
    0 asks no worker."""
    render_seconds: Annotated[float, Meta(ge=0)] = 2.0
    """A chat waits so long for a worker to render it for both; 0 lets each render it itself."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the router (CORS), `*` for all."""

    def headers_for_workers(self) -> dict[str, str]:
        """What workers ask for."""
        if self.worker_key is None:
            return {}
        return {"Authorization": f"Bearer {self.worker_key.current}"}

    def __post_init__(self) -> None:
        check_bounds(self)
        for header in self.forward_headers:
            if header.lower() in _OWN_HEADERS:
                raise InvalidArgument(
                    f"the header {header} of a client cannot be forwarded, as workers get one that "
                    "the router makes; leave it out"
                )
            if not _HEADER.fullmatch(header):
                raise InvalidArgument(f"{header!r} is no name of a header; use one like X-Tenant")
