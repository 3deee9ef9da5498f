"""The findings of the checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    INFO = "info"  # neither good nor bad
    LIMITED = "limited"  # works, slower or not everywhere
    ABSENT = "absent"  # an option this host or version does not have
    BROKEN = "broken"  # the core cannot work


class Area(StrEnum):
    ENGINE = "engine"
    FABRICS = "fabrics"
    NICS = "NICs"
    GPUS = "GPUs"
    LIMITS = "limits"
    PYTHON = "Python"
    SETTINGS = "settings"
    HARDWARE = "hardware"  # only with --probe
    LOOPBACK = "loopback"  # likewise


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `remedy` says what to do, if anything."""

    area: Area
    name: str
    status: Status
    detail: str
    remedy: str | None = None
