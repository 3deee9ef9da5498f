"""The bearer tokens that the control plane accepts, and what each of them may do."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import InvalidArgument
from kvxfer.watched_file import WatchedFile

# The characters of RFC 6750; 16 of them exclude most words that a person makes up.
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Scope(StrEnum):
    """The rights of a token; each route names the scopes that it takes."""

    WORKER = "worker"  # join the fleet, keep a lease, leave
    ROUTER = "router"  # open and release transfers
    TRAINER = "trainer"  # lead weight updates
    ADMIN = "admin"  # drain instances, change roles, release what others hold
    MONITOR = "monitor"  # read metrics and nothing else


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as the tokens file names it."""

    name: str
    scopes: frozenset[Scope]


ANONYMOUS: Final = Caller("anonymous", frozenset(Scope))


class Tokens:
    """The tokens of a file, by the keyed hash of each: the tokens themselves are not kept.

    A look-up takes the same time for a token that is nearly right as for one that is all wrong: it
    compares hashes under a key that only this process knows.
    """

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._key = secrets.token_bytes(32)
        self._callers = {self._hash(token): caller for token, caller in callers.items()}

    def caller(self, token: str) -> Caller | None:
        return self._callers.get(self._hash(token))

    def _hash(self, token: str) -> bytes:
        return hmac.digest(self._key, token.encode(errors="replace"), "sha256")


def parse_tokens(content: bytes) -> Tokens:
    """Parses lines of a name, scopes separated by commas, and a token.

    Ignores empty lines and lines that begin with #. A name may have several tokens. Raises
    InvalidArgument, which names the line and never the token.
    """
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the tokens file is no UTF-8 text: {error.reason}") from None
    callers: dict[str, Caller] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        token, caller = _parse_line(line.split(), f"line {number} of the tokens file")
        if token in callers:
            raise InvalidArgument(
                f"line {number} of the tokens file repeats the token of "
                f"{callers[token].name!r}; give each caller its own"
            )
        callers[token] = caller
    if not callers:
        raise InvalidArgument("the tokens file has no token; write lines of NAME SCOPES TOKEN")
    return Tokens(callers)


def _parse_line(words: list[str], where: str) -> tuple[str, Caller]:
    if len(words) != 3:
        raise InvalidArgument(f"{where} has {len(words)} words; write NAME SCOPES TOKEN")
    name, scopes, token = words
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{where} names {name!r}; use letters, digits and . _ - in a name")
    unknown = set(scopes.split(",")) - set(Scope)
    if unknown:
        raise InvalidArgument(
            f"{where} has scope {min(unknown)!r}; use {', '.join(Scope)}, with commas between"
        )
    if not _TOKEN.fullmatch(token):
        raise InvalidArgument(
            f"the token on {where} is no bearer token of at least 16 characters; take one from "
            "`openssl rand -hex 32`"
        )
    return token, Caller(name, frozenset(Scope(scope) for scope in scopes.split(",")))


def watch_tokens(path: Path, *, clock: Clock = SYSTEM_CLOCK) -> WatchedFile[Tokens]:
    """Returns the tokens of a file, read again when it changes. Raises InvalidArgument."""
    return WatchedFile("tokens file", path, parse_tokens, clock=clock)
