"""What an inference rank has staged, as its inference engine sees it."""

from __future__ import annotations

from typing import NamedTuple

from kvxfer.weights.transfer.settings import Policy


class Staged(NamedTuple):
    """An update, or a wave of one, that a rank has, whole and checked, and does not serve yet."""

    update_id: str
    version: int
    digest: str | None
    """Of all waves so far, 16 hex digits; None where digests are off."""
    policy: Policy | None = None
    """What becomes of requests that run; None leaves that to the instance."""
    wave: int = 0
    waves: int = 1

    @property
    def first(self) -> bool:
        """The instance leaves service before it applies this."""
        return self.wave == 0

    @property
    def last(self) -> bool:
        """The instance serves the version once it has applied this."""
        return self.wave + 1 == self.waves
