"""The ways to move rows, which each rank's process measures."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Times: TypeAlias = NDArray[np.int64]
"""Nanoseconds of CLOCK_MONOTONIC at one rank, [rounds, 3]: dispatch begins; its rows are in place
and combine begins; the rows of combine are in place."""


class Way(StrEnum):
    """A way to move rows. The value is its name in tables and JSON."""

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
        """The fabric of an exchange; None for any other way."""
        return {Way.LOCAL: "local", Way.LOCAL_EXPERTS: "local"}.get(
            self, "tcp" if self in (Way.TCP, Way.TCP_EXPERTS) else None
        )

    @property
    def by_expert(self) -> bool:
        return self in (Way.LOCAL_EXPERTS, Way.TCP_EXPERTS)

    @property
    def beside(self) -> bool:
        """True if it is shown for information, with a quarter of the rounds."""
        return self.by_expert or self is Way.MPI_TCP


class WrongBytes(AssertionError):
    """The received bytes differ from the sent bytes."""


class Member(Protocol):
    """One rank's part of one way. All ranks run the same number of rounds."""

    def run(self, rounds: int) -> Times:
        """Dispatches and combines `rounds` times, in step with the other ranks."""

    def check(self) -> None:
        """Raises WrongBytes if the result of the last round is wrong."""
