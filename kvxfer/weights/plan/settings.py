"""The sizes by which a weight update is cut into writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kvxfer.errors import InvalidArgument
from kvxfer.settings import check_bounds

_Size = Annotated[int, Meta(ge=1, le=1 << 40)]


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """The sizes by which a weight update is cut into writes. Raises InvalidArgument that names the
    member and its bounds."""

    slice_bytes: Annotated[int, Meta(ge=16, le=1 << 40)] = 64 << 20
    """Most bytes of one write; larger pieces are cut."""
    gather_bytes: _Size = 1 << 20
    """Pieces of fewer bytes are gathered into one write; at most half of a slice."""
    burst_bytes: _Size = 1 << 30
    """Most bytes of a burst that go to one receiver."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.gather_bytes * 2 > self.slice_bytes:
            raise InvalidArgument(
                f"gather_bytes is {self.gather_bytes}; use at most half of slice_bytes, which is "
                f"{self.slice_bytes}"
            )
        if self.burst_bytes < self.slice_bytes:
            raise InvalidArgument(
                f"burst_bytes is {self.burst_bytes}; use slice_bytes or more, which is "
                f"{self.slice_bytes}"
            )
