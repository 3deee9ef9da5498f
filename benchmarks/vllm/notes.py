"""What the timed connector notes of each request: one line in a file that all servers share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

NOTES_VARIABLE: Final = "KVXFER_BENCH_NOTES"
"""The path of the file."""
LATE: Final = "-late-"
"""In the id of a request that is sent after prefill."""

BUSY: Final = "-busy-"
"""In the id of a request for which no worker waits in steps that compute nothing."""

# vLLM puts the router's request id between a prefix and a suffix of its own.
_NOTE: Final = re.compile(r"(\w+) (\w+) \S*?(bench-\S+?-\d+)-0-\S* ([\d.]+)")


def read(path: Path) -> Mapping[str, Mapping[tuple[str, str], float]]:
    """By request: when each server, by name, first noted each event."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for server, event, request_id, moment in _NOTE.findall(path.read_text()):
        found.setdefault(request_id, {}).setdefault((server, event), float(moment))
    return found
