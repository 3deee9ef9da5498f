"""The version that an inference rank serves, or the reason why it is out of service."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvxfer.errors import KvxferError
from kvxfer.weights.transfer.messages import Prepare, said
from kvxfer.weights.transfer.staged import Staged

_MODULUS: Final = 1 << 64


class _Progress(NamedTuple):
    """The waves of an update that a rank has applied."""

    plan_id: str
    version: int
    waves: int
    digest: int


class Service:
    """The service state of one rank. Event loop only, except `version` and `digest`."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.digest: str | None = None
        self.error: KvxferError | None = None
        """The reason why it is out of service for good."""
        self.partial: str | None = None
        """The reason why it is out of service until its next whole update."""
        self._progress: _Progress | None = None

    def begin(self, prepare: Prepare) -> bool:
        """Begins a wave. Returns whether it may be staged: the first may, and the one after the
        last that was applied."""
        if prepare.wave == 0:
            self._progress = None
            return True
        known = self._progress
        return known is not None and known[:3] == (prepare.plan_id, prepare.weights, prepare.wave)

    def staged(self, prepare: Prepare, digest: int | None) -> Staged:
        """Returns the wave that has arrived, as staged; `digest` is that of this wave alone."""
        if digest is not None and self._progress is not None:
            digest = (digest + self._progress.digest) % _MODULUS
        return Staged(
            prepare.update_id,
            prepare.weights,
            None if digest is None else f"{digest:016x}",
            prepare.policy,
            prepare.wave,
            prepare.waves,
        )

    def applied(self, staged: Staged, plan_id: str) -> None:
        if staged.last:
            self.version, self.digest = staged.version, staged.digest
            self.partial = self._progress = None
            return
        done = staged.wave + 1
        self.partial = f"it has {done} of {staged.waves} waves of version {staged.version}"
        digest = int(staged.digest or "0", 16)
        self._progress = _Progress(plan_id, staged.version, done, digest)

    def failed(self, staged: Staged, error: BaseException) -> None:
        """Records a failure to apply. If it was a wave, the next update may bring the rank back."""
        why = said(error)
        self._progress = None
        if staged.waves == 1:
            self.error = why.error()
        else:
            self.partial = f"a wave of version {staged.version} was not applied: {why.text}"
