"""What is measured in each process of a rank."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Times: TypeAlias = NDArray[np.int64]
"""[rounds, 3], nanoseconds of CLOCK_MONOTONIC at one rank: dispatch begins; its rows are in place,
and combine begins; its rows are in place."""


class Way(StrEnum):
    """How rows move. The value is its name in tables and JSON."""

    LOCAL = "local"
    LOCAL_EXPERTS = "local, by expert"
    TCP = "tcp"
    TCP_EXPERTS = "tcp, by expert"
    MEMCPY = "memcpy"
    MPI = "MPI"
    MPI_TCP = "MPI, tcp"
    GLOO = "gloo"

    @property
    def fabric(self) -> str | None:
        """Of an exchange."""
        return {Way.LOCAL: "local", Way.LOCAL_EXPERTS: "local"}.get(
            self, "tcp" if self in (Way.TCP, Way.TCP_EXPERTS) else None
        )

    @property
    def by_expert(self) -> bool:
        return self in (Way.LOCAL_EXPERTS, Way.TCP_EXPERTS)

    @property
    def beside(self) -> bool:
        """Shown for information: a quarter of the rounds."""
        return self.by_expert or self is Way.MPI_TCP


class WrongBytes(AssertionError):
    """What has arrived is not what was sent."""


class Member(Protocol):
    """One rank's part of one way. All ranks are asked for the same number of rounds."""

    def run(self, rounds: int) -> Times:
        """Dispatches and combines so many times, in step with the other ranks."""

    def check(self) -> None:
        """Raises WrongBytes where the last round has not left what it should have."""
