"""The Python decoders as functions of bytes.

Each module here is a target. `run(data)` raises if a promise is broken. `DECODERS` has the files
that the target must cover, each with its functions, or None for all.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

TARGETS: Final = (
    "messages",
    "tickets",
    "answers",
    "router_bodies",
    "sglang_bootstrap",
    "endpoint",
    "brokered",
    "redis_records",
    "spans",
)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
