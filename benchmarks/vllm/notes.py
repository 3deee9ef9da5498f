"""The notes of the timed connectors: lines in a file that all servers share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

NOTES_VARIABLE: Final = "KVXFER_BENCH_NOTES"
"""The path of the file."""

BUSY: Final = "-busy-"
"""Part of the id of a request for which no worker waits in steps that compute nothing."""

FORWARD: Final = "forward"

# vLLM puts the router's request id between its own prefix and suffix.
_NOTE: Final = re.compile(r"(\w+) (\w+) \S*?(bench-\S+?-\d+)-0-\S* ([\d.]+)")
_FORWARD: Final = re.compile(rf"^\w+ {FORWARD} (\d+) ([\d.]+) ([\d.]+)$", re.MULTILINE)


class Forward(NamedTuple):
    """The time of one forward's thread that the connector used, in seconds."""

    requests: int
    """The number of requests whose blocks it sends."""
    before: float
    """The time before the first layer, for all requests."""
    layer: float
    """The median of the layers."""


def read(path: Path) -> Mapping[str, Mapping[tuple[str, str], float]]:
    """Returns the times when each server, by name, first noted each event, by request."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for server, event, request_id, moment in _NOTE.findall(path.read_text()):
        found.setdefault(request_id, {}).setdefault((server, event), float(moment))
    return found


def forwards(path: Path) -> Iterator[Forward]:
    """Yields the notes of steps that sent something."""
    for requests, before, layer in _FORWARD.findall(path.read_text()):
        yield Forward(int(requests), float(before), float(layer))
