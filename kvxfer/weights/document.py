"""A weight map as JSON: docs/weight-maps.md has its schema."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvxfer.errors import InvalidArgument
from kvxfer.unreadable import UNREADABLE
from kvxfer.weights.maps import WeightMap


def read_map(path: Path) -> WeightMap:
    """Reads a weight map from a JSON file.

    Raises InvalidArgument that names the file and the member: by its path if the value has a wrong
    type or size, otherwise with its value.
    """
    try:
        document = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"the weight map {path} cannot be read: {error}") from error
    return parse_map(document, str(path))


def parse_map(document: bytes, name: str) -> WeightMap:
    """Parses a weight map from JSON; errors call it `name`. Raises InvalidArgument."""
    try:
        return msgspec.json.decode(document, type=WeightMap)
    except UNREADABLE as error:
        raise InvalidArgument(f"{name}: {error}; docs/weight-maps.md has the schema") from error


def as_document(weights: WeightMap) -> bytes:
    """Returns the JSON of a map, without the members that have their default."""
    whole = msgspec.json.encode(weights)
    return msgspec.json.format(whole, indent=2) + b"\n"
