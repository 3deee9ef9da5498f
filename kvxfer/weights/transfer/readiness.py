"""The training ranks that have pushed, or cannot, and the wait for all of them."""

from __future__ import annotations

import asyncio

from kvxfer.errors import DeadlineExceeded, EngineError, WeightsMismatch, WeightUpdateAborted
from kvxfer.weights.transfer.members import Members, TrainingRank
from kvxfer.weights.transfer.messages import Ready, Said, Withdraw


class Readiness:
    """The readiness of the training ranks among these members. Event loop only."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._ready: dict[int, Ready] = {}
        """The READY of each training rank's push, by rank."""
        self._lost: dict[int, EngineError] = {}
        """The losses of training ranks that have not joined again, by rank."""
        self._changed = asyncio.Event()

    def joined(self, rank: int) -> None:
        self._lost.pop(rank, None)

    def take(self, member: TrainingRank, ready: Ready) -> None:
        self._ready[member.joined.rank] = ready
        self._changed.set()

    def withdraw(self, member: TrainingRank, withdraw: Withdraw) -> bool:
        """Removes a push; returns False if it was neither awaited nor carried out."""
        ready = self._ready.get(member.joined.rank)
        if ready is None or ready.serial != withdraw.serial:
            return False
        del self._ready[member.joined.rank]
        self._changed.set()
        return True

    def lose(self, member: TrainingRank, error: EngineError) -> None:
        if member.joined.rank in self._refusals():  # a rank that refuses may end for that
            return
        self._ready.pop(member.joined.rank, None)
        self._lost[member.joined.rank] = type(error)(f"{member.name} was lost: {error}")
        self._changed.set()

    def pushes(self) -> dict[int, Ready]:
        """Returns the pushes that are awaited or carried out, by training rank."""
        return dict(self._ready)

    def settle(self, pushes: dict[int, Ready]) -> None:
        """Removes these pushes, which have ended. A newer push of a rank stays."""
        self._ready = {
            rank: each for rank, each in self._ready.items() if each is not pushes.get(rank)
        }

    async def first(self) -> None:
        """Waits until a first training rank is ready."""
        while not self._ready:
            self._changed.clear()
            await self._changed.wait()

    async def all(self, seconds: float) -> int:
        """Waits for all training ranks, and returns the version that they push. Raises the loss of
        one, DeadlineExceeded, and WeightsMismatch if their versions differ or one cannot send."""
        try:
            async with asyncio.timeout(seconds):
                while missing := self.missing():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"training ranks {missing} have not pushed within {seconds:g} s of the first"
            ) from None
        for rank, why in self._refusals().items():
            raise WeightsMismatch(f"training rank {rank} cannot send it: {why.text}")
        versions = sorted({each.weights for each in self._ready.values()})
        if len(versions) > 1:
            raise WeightsMismatch(f"training ranks push the versions {versions}; push one")
        return versions[0]

    def missing(self) -> list[int]:
        """Returns the ranks that have not pushed. Raises the loss of one, and WeightUpdateAborted
        if no push is left."""
        known = {each.joined.rank for each in self._members.training if each.peer.alive}
        missing = set(self._members.missing_trainers()) | (known - set(self._ready))
        for error in self._lost.values():
            raise type(error)(str(error))
        if not self._ready:  # the last one that was ready has withdrawn, or is lost
            raise WeightUpdateAborted("no training rank is ready any more")
        return sorted(missing - self._refusals().keys())

    def _refusals(self) -> dict[int, Said]:
        """Returns the reasons of the ranks that cannot push, by training rank."""
        answers = sorted(self._ready.items())
        return {rank: each.refused for rank, each in answers if each.refused is not None}
