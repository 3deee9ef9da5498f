"""What the process of a rank says to the one that has started it. They are pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Here:
    """The address of its engine. It is answered with those of all ranks."""

    address: str


@dataclass(frozen=True, slots=True)
class Generated:
    prompt: int
    token: int


@dataclass(frozen=True, slots=True)
class Ended:
    """All steps have been taken."""

    members: tuple[int, ...]
    """The ranks that were left."""
    repeated: int
    absent: int
    """As of SpreadExperts."""


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


Said: TypeAlias = Here | Generated | Ended | Failed
