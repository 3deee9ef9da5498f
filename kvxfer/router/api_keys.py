"""The API keys that the router requires from its clients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from starlette.requests import Request

from kvxfer.clock import Clock
from kvxfer.errors import InvalidApiKey, InvalidArgument, TooManyWrongKeys
from kvxfer.watched_file import WatchedFile
from kvxfer.web.rate_limit import wrong_tokens
from kvxfer.web.request_log import CALLER_KEY
from kvxfer.web.tokens import Caller, Tokens

_KEY: Final = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


def watch_api_keys(path: Path) -> WatchedFile[Tokens]:
    """Returns the keys of a file, read again when it changes. Raises InvalidArgument."""
    return WatchedFile("API keys file", path, parse_api_keys)


def parse_api_keys(content: bytes) -> Tokens:
    """Parses lines of NAME KEY; the name goes into logs. Ignores empty lines and lines that begin
    with #. Raises InvalidArgument, which names the line and never the key."""
    callers: dict[str, Caller] = {}
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _KEY.fullmatch(words[1]):
            raise InvalidArgument(
                f"line {number} of the API keys file is not NAME KEY with a key of at least 16 "
                "characters; take one from `openssl rand -hex 32`"
            )
        callers[words[1]] = Caller(words[0], frozenset())
    if not callers:
        raise InvalidArgument("the API keys file has no key; write lines of NAME KEY")
    return Tokens(callers)


class ApiKeyGuard:
    """A check of each request's API key. One event loop. Without `keys` every client is served."""

    def __init__(self, keys: WatchedFile[Tokens] | None, clock: Clock) -> None:
        self._keys = keys
        self._failures = wrong_tokens(clock)

    def admit(self, request: Request) -> None:
        """Raises InvalidApiKey, or TooManyWrongKeys if they come too fast from one address."""
        if self._keys is None:
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("X-API-Key", "")  # as clients of Anthropic's API send it
        if not key.strip():
            raise InvalidApiKey("this router requires an API key; send Authorization: Bearer KEY")
        caller = self._keys.current.caller(key.strip())
        if caller is None:
            address = "unknown" if request.client is None else request.client.host
            if seconds := self._failures.wait_seconds(address):
                raise TooManyWrongKeys(
                    f"too many wrong API keys from the address {address}; retry in "
                    f"{seconds:.3f} s, with a key that this router knows",
                    retry_after_seconds=seconds,
                )
            raise InvalidApiKey("this router does not know the API key")
        request.scope[CALLER_KEY] = caller.name
