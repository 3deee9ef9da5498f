"""A weight map as JSON: docs/weights.md has its schema."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvxfer.errors import InvalidArgument
from kvxfer.unreadable import UNREADABLE
from kvxfer.weights.maps import WeightMap


def read_map(path: Path) -> WeightMap:
    """Raises InvalidArgument that names the file and the member: of a value of a wrong type or size
    its path, otherwise the value, too."""
    try:
        document = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"the weight map {path} cannot be read: {error}") from error
    return parse_map(document, str(path))


def parse_map(document: bytes, name: str) -> WeightMap:
    """The map that the JSON describes; `name` is what errors call it. Raises InvalidArgument."""
    try:
        return msgspec.json.decode(document, type=WeightMap)
    except UNREADABLE as error:
        raise InvalidArgument(f"{name}: {error}; docs/weights.md has the schema") from error


def as_document(weights: WeightMap) -> bytes:
    """The JSON of a map, without the members that have their default."""
    whole = msgspec.json.encode(weights)
    return msgspec.json.format(whole, indent=2) + b"\n"
