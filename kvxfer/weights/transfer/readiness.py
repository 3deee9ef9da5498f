"""Which training ranks have pushed, or cannot, and wait for the others."""

from __future__ import annotations

import asyncio

from kvxfer.errors import DeadlineExceeded, EngineError, WeightsMismatch, WeightUpdateAborted
from kvxfer.weights.transfer.members import Members, TrainingRank
from kvxfer.weights.transfer.messages import Ready, Said, Withdraw


class Readiness:
    """Of the training ranks among these members. Event loop only."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._ready: dict[int, Ready] = {}
        """By training rank: what it has said of its push."""
        self._lost: dict[int, EngineError] = {}
        """By training rank: those that have not joined again."""
        self._changed = asyncio.Event()

    def joined(self, rank: int) -> None:
        self._lost.pop(rank, None)

    def take(self, member: TrainingRank, ready: Ready) -> None:
        self._ready[member.joined.rank] = ready
        self._changed.set()

    def withdraw(self, member: TrainingRank, withdraw: Withdraw) -> bool:
        """Whether that push was waited for, or carried out."""
        ready = self._ready.get(member.joined.rank)
        if ready is None or ready.serial != withdraw.serial:
            return False
        del self._ready[member.joined.rank]
        self._changed.set()
        return True

    def lose(self, member: TrainingRank, error: EngineError) -> None:
        if member.joined.rank in self._refusals():  # it may have ended for that
            return
        self._ready.pop(member.joined.rank, None)
        self._lost[member.joined.rank] = type(error)(f"{member.name} was lost: {error}")
        self._changed.set()

    def pushes(self) -> dict[int, Ready]:
        """By training rank: those that are waited for, or carried out."""
        return dict(self._ready)

    def settle(self, pushes: dict[int, Ready]) -> None:
        """These have ended. A rank that has withdrawn may be ready again."""
        self._ready = {
            rank: each for rank, each in self._ready.items() if each is not pushes.get(rank)
        }

    async def first(self) -> None:
        """A first training rank is ready."""
        while not self._ready:
            self._changed.clear()
            await self._changed.wait()

    async def all(self, seconds: float) -> int:
        """The version that all training ranks have. Raises the loss of one, DeadlineExceeded, and
        WeightsMismatch where they have different ones, or one cannot send it."""
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
        """Those that have not pushed. Raises the loss of one."""
        known = {each.joined.rank for each in self._members.training if each.peer.alive}
        missing = set(self._members.missing_trainers()) | (known - set(self._ready))
        for error in self._lost.values():
            raise type(error)(str(error))
        if not self._ready:  # the last one that was ready has withdrawn, or is lost
            raise WeightUpdateAborted("no training rank is ready any more")
        return sorted(missing - self._refusals().keys())

    def _refusals(self) -> dict[int, Said]:
        """By training rank."""
        answers = sorted(self._ready.items())
        return {rank: each.refused for rank, each in answers if each.refused is not None}
