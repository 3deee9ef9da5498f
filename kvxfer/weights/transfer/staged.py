"""The update that an inference rank has staged, as its inference engine sees it."""

from __future__ import annotations

from typing import NamedTuple

from kvxfer.weights.transfer.settings import Policy


class Staged(NamedTuple):
    """An update, or a wave of one, that has arrived whole, is checked, and is not yet served."""

    update_id: str
    version: int
    digest: str | None
    """The digest of all waves so far, 16 hex digits; None without digests."""
    policy: Policy | None = None
    """The fate of running requests; None leaves that to the instance."""
    wave: int = 0
    waves: int = 1

    @property
    def first(self) -> bool:
        """True if the instance leaves service before it applies this."""
        return self.wave == 0

    @property
    def last(self) -> bool:
        """True if the instance serves the version once it has applied this."""
        return self.wave + 1 == self.waves
