"""The messages of a rank's process to the process that has started it. They are pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Here:
    """The address of the rank's engine. The answer is the addresses of all ranks."""

    address: str


@dataclass(frozen=True, slots=True)
class Generated:
    prompt: int
    token: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a rank that has taken all steps."""

    members: tuple[int, ...]
    """The ranks that were still live."""
    repeated: int
    absent: int
    """The counts of SpreadExperts."""


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


Said: TypeAlias = Here | Generated | Ended | Failed
