"""The answers that the coordinator awaits from the members of a plan or a wave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from kvxfer.errors import DeadlineExceeded, EngineError, KvxferError
from kvxfer.weights.transfer.members import InferenceRank, Member
from kvxfer.weights.transfer.messages import Applied, Failed, Planned, Read, Vote

T = TypeVar("T")

Answering: TypeAlias = Planned | Vote | Failed | Applied | Read


class Answer(NamedTuple):
    """The outcome at an instance that had to apply an update."""

    state: Literal["committed", "failed", "lost", "partial"]
    pause_seconds: float | None = None
    error: str | None = None


class Round:
    """The answers of the members with which the round began. Event loop only."""

    def __init__(self, about: str, members: Sequence[Member]) -> None:
        """about: the id of the plan or the wave; answers about another one do not count."""
        self._about = about
        self._members = {each.peer.id: each for each in members}
        self._said: dict[tuple[int, type], Any] = {}
        self._lost: dict[int, KvxferError] = {}
        """The losses of members, by id of the peer."""
        self._error: KvxferError | None = None
        self._changed = asyncio.Event()

    def take(self, member: Member, message: Answering) -> None:
        about = message.plan_id if isinstance(message, Planned) else message.update_id
        if about != self._about or member.peer.id not in self._members:
            return
        self._said[member.peer.id, type(message)] = message
        if isinstance(message, Failed):
            self.fail(_by(member, message.why.error()))
        elif isinstance(message, Planned) and message.failed is not None:
            self.fail(_by(member, message.failed.error()))
        self._change()

    def lose(self, member: Member, error: EngineError) -> None:
        if member.peer.id in self._members:
            loss = type(error)(f"{member.name} was lost: {error}")
            self._lost[member.peer.id] = loss
            self.fail(loss)

    def fail(self, error: KvxferError) -> None:
        """Fails the round; only the first error counts."""
        self._error = self._error or error
        self._change()

    def instances(self) -> dict[str, list[InferenceRank]]:
        found: dict[str, list[InferenceRank]] = {}
        for member in self._members.values():
            if isinstance(member, InferenceRank):
                found.setdefault(member.joined.instance_id, []).append(member)
        return found

    async def all(
        self, kind: type[T], members: Sequence[Member], seconds: float, what: str
    ) -> list[tuple[Member, T]]:
        """Waits until each of these members has sent a message of this kind, and returns them.
        Raises the failure or loss of any member, and DeadlineExceeded that names those that have
        not answered."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    self.check()
                    silent = [each for each in members if (each.peer.id, kind) not in self._said]
                    if not silent:
                        return [(each, self._said[each.peer.id, kind]) for each in members]
                    await self._changed.wait()
        except TimeoutError:
            names = ", ".join(each.name for each in silent)
            raise DeadlineExceeded(f"{names} had not {what} after {seconds:g} s") from None

    async def applied(self, ranks: Sequence[InferenceRank], seconds: float) -> Answer:
        """Waits until the ranks of an instance have applied the update, or fail, or are lost."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    answers = [self._said.get((each.peer.id, Applied)) for each in ranks]
                    failed = [each.failed for each in answers if each is not None and each.failed]
                    if failed:
                        return Answer("failed", error=f"{failed[0].text} ({failed[0].code})")
                    if None not in answers:
                        pauses = [each.pause_seconds for each in answers if each is not None]
                        known = [pause for pause in pauses if pause is not None]
                        return Answer("committed", max(known, default=None))
                    silent = [
                        each.peer.id
                        for each, answer in zip(ranks, answers, strict=True)
                        if answer is None
                    ]
                    lost = [self._lost[ident] for ident in silent if ident in self._lost]
                    if lost:
                        return Answer("lost", error=str(lost[0]))
                    await self._changed.wait()
        except TimeoutError:
            return Answer("lost", error=f"it had not applied the update after {seconds:g} s")

    def check(self) -> None:
        """Raises the first failure or loss of any member."""
        if self._error is not None:
            raise self._error

    def _change(self) -> None:
        """Wakes all waiters."""
        self._changed.set()
        self._changed = asyncio.Event()


def _by(member: Member, error: KvxferError) -> KvxferError:
    return type(error)(f"{member.name}: {error}")
