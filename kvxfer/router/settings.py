"""What an operator can set about the router."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from kvxfer.errors import InvalidArgument
from kvxfer.watched_file import WatchedFile
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
    """How workers exchange block tables: decode's engine sends them to prefill's, or they go by the
    control plane."""
    attempts: int = 4
    """Pairs that a request may be tried on, at most 64."""
    first_token_seconds: float = 30.0
    """From a request's arrival: no attempt is begun later, and none waits longer."""
    capacity_seconds: float = 5.0
    """How long a request waits for a pair while there is none."""
    token_seconds: float = 30.0
    """A decode worker that is silent for so long between two tokens is given up."""
    client_seconds: float = 60.0
    """A client that takes nothing for so long is given up, and its request with it."""
    max_requests: int = 1024
    """Under way at once; the next one is answered 503."""
    max_body_bytes: int = 4 << 20
    bytes_per_token: float = 4.0
    """What a prompt of text is taken to hold where its tokens are not known in time, for the blocks
    that are reserved."""
    tokenize_seconds: float = 0.05
    """How long a request of text waits for a worker to say its tokens, which tell where they are
    cached; 0 asks no worker."""

    def headers_for_workers(self) -> dict[str, str]:
        """What workers ask for."""
        if self.worker_key is None:
            return {}
        return {"Authorization": f"Bearer {self.worker_key.current}"}

    def __post_init__(self) -> None:
        for name in ("attempts", "max_requests", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; use 1 or more")
        for header in self.forward_headers:
            if header.lower() in _OWN_HEADERS:
                raise InvalidArgument(
                    f"the header {header} of a client cannot be forwarded, as workers get one that "
                    "the router makes; leave it out"
                )
            if not _HEADER.fullmatch(header):
                raise InvalidArgument(f"{header!r} is no name of a header; use one like X-Tenant")
        if self.attempts > 64:  # as many as `avoid` of POST /v1/transfers takes
            raise InvalidArgument(f"attempts is {self.attempts}; use 64 or fewer")
        for name in (
            "first_token_seconds",
            "capacity_seconds",
            "token_seconds",
            "client_seconds",
            "bytes_per_token",
        ):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; use more than 0")
        if not self.tokenize_seconds >= 0:
            raise InvalidArgument(f"tokenize_seconds is {self.tokenize_seconds}; use 0 or more")
