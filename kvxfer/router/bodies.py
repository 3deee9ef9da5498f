"""The members of a request's body, each as the bytes that the client sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from kvxfer.unreadable import UNREADABLE

Members: TypeAlias = Mapping[str, msgspec.Raw]
"""Members by name. Those that are not decoded reach the workers byte for byte."""

NO_MEMBERS: Final[Members] = {}

_TEXT: Final = frozenset(
    {"arguments", "content", "input", "instructions", "output", "system", "text", "thinking"}
)
_DEEPEST: Final = 16
_HALF: Final = re.compile("[\ud800-\udfff]")


def read_members(content: bytes) -> Members | None:
    """Returns the members of a JSON object; None if the body is none, which a worker refuses."""
    try:
        return msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        pass
    # Python's json, which inference engines use, accepts more: NaN, half of a surrogate pair.
    try:
        read = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict):
        return None
    # UTF-8 has no such halves; no worker knows a member with one in its name.
    return {name: as_raw(value) for name, value in read.items() if not _HALF.search(name)}


def has(members: Members, name: str) -> bool:
    """Whether the member is present, and not null."""
    raw = members.get(name)
    return raw is not None and bytes(raw) != b"null"


def value_of(members: Members, name: str) -> Any:
    """Returns a member's value; None if it is missing, null, or unreadable for msgspec."""
    raw = members.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except UNREADABLE:
        return None


def as_raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def is_on(value: Any) -> bool:
    """Whether pydantic reads the value as true."""
    if isinstance(value, str):
        return value.lower() in {"1", "on", "t", "true", "y", "yes"}
    return isinstance(value, int | float) and value == 1


def as_integer(value: Any) -> int | None:
    """Reads an integer as pydantic does: 16.0 is one. Returns None for anything else."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if whole and not isinstance(value, bool) else None


def token_ids(value: Any) -> list[int] | None:
    """Returns the value if it is a prompt of token ids, otherwise None."""
    if not isinstance(value, list) or not value:
        return None
    return value if all(type(i) is int and 0 <= i < 1 << 63 for i in value) else None


def text_bytes(value: Any, depth: int = 0) -> int:
    """Counts the UTF-8 bytes of the text in messages, or in other content of a prompt."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if depth == _DEEPEST:
        return 0
    if isinstance(value, list):
        return sum(text_bytes(part, depth + 1) for part in value)
    if isinstance(value, dict):
        said = (part for name, part in value.items() if name in _TEXT)
        return sum(text_bytes(part, depth + 1) for part in said)
    return 0
