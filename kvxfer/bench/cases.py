"""The cases to measure, and the limit of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvxfer.errors import InvalidArgument


class Limit(StrEnum):
    """The limits of a host without an engine."""

    RAW_TCP = "raw-tcp"
    MEMCPY = "memcpy"
    READV = "process-vm-readv"


LIMIT_TITLES = {
    Limit.RAW_TCP: "raw TCP, 1 MiB buffers",
    Limit.MEMCPY: "memcpy of the same pages",
    Limit.READV: "process_vm_readv, 1,024 pages a call",
}


class SourceMemory(StrEnum):
    """The kinds of memory of the sender's pages."""

    ALLOCATED = "allocated"  # allocated by the engine: shareable with a peer on this host
    REGISTERED = "registered"  # allocated elsewhere, registered with the engine


@dataclass(frozen=True, slots=True)
class Case:
    """One way through the engine."""

    name: str
    fabric: str
    memory: SourceMemory
    limit: Limit


CASES = {
    case.name: case
    for case in (
        Case("tcp", "tcp", SourceMemory.ALLOCATED, Limit.RAW_TCP),
        Case("local", "local", SourceMemory.ALLOCATED, Limit.MEMCPY),
        Case("local-cma", "local", SourceMemory.REGISTERED, Limit.READV),
    )
}


def cases_by_name(names: list[str]) -> tuple[Case, ...]:
    """Returns the named cases in the order given. Raises InvalidArgument for an unknown name."""
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        raise InvalidArgument(
            f"no such fabric: {', '.join(unknown) or 'none given'}; choose from {', '.join(CASES)}"
        )
    return tuple(CASES[name] for name in dict.fromkeys(names))
