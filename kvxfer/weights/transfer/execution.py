"""One update, from the order to stage until all instances have answered.

A two-phase commit (J. Gray, Notes on Data Base Operating Systems, 1978, 5.8.3): an update, or a
wave of one, is committed when every inference rank has staged it, and aborted by any loss, failure
or deadline before that.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from msgspec.structs import replace

from kvxfer.clock import Clock
from kvxfer.errors import KvxferError, PeerLost, WeightUpdateAborted
from kvxfer.weights.report import InstanceReport, UpdateReport
from kvxfer.weights.transfer.links import Links, logger
from kvxfer.weights.transfer.members import InferenceRank, Member, Members, Standing
from kvxfer.weights.transfer.messages import Commit, Prepare, Push, Ready, Vote
from kvxfer.weights.transfer.registrar import Announced
from kvxfer.weights.transfer.round import Answer, Round
from kvxfer.weights.transfer.settings import UpdateSettings


class ControlPath(Protocol):
    """The control path of inference engines that do not commit by message. It applies an update at
    all ranks of an instance, at one point between two steps. pin() comes first; each method may
    raise."""

    async def pin(self, update_id: str, version: int) -> None:
        """Makes every rank pin the update."""

    async def commit(self, update_id: str, version: int) -> None:
        """Makes every rank apply what it has pinned."""

    async def unpin(self, update_id: str) -> None:
        """Makes every rank drop what it has pinned: after an abort, or a call that failed."""


class Execution:
    """The execution of an update whose plan all members have made. Event loop only.

    An instance that does not apply a wave leaves the update, and the others continue. A failure
    while a wave is staged ends the update for all.
    """

    def __init__(
        self,
        links: Links,
        members: Members,
        pushes: dict[int, Ready],
        plan_id: str,
        settings: UpdateSettings,
        control_path: ControlPath | None,
        clock: Clock,
    ) -> None:
        """pushes: by training rank."""
        self._links, self._members, self._pushes = links, members, pushes
        self._plan_id = plan_id
        self._settings, self._control_path, self._clock = settings, control_path, clock
        self._training = members.training
        self._numbers = {each.peer.id: at for at, each in enumerate(members.inference)}
        self._instances = members.instances
        self._going = members.instances
        self._answers: dict[str, Answer] = {}
        self._digests: dict[str, str] = {}
        self.round = Round("", ())
        self.wave_id = ""
        self.decided = False
        """Whether the update is committed, and can no longer be aborted."""
        self.left_pinned: str | None = None
        """The update that ranks may still have pinned, as a call of the control path failed."""
        self.read = False
        """Whether training ranks have the order to send their last wave: then their memory may
        change."""

    @property
    def leaders(self) -> dict[str, InferenceRank]:
        return {instance_id: ranks[0] for instance_id, ranks in self._going.items()}

    async def run(self, report: UpdateReport, announced: Announced) -> UpdateReport:
        """Stages, decides and applies the update. Raises the cause of an abort, but none after the
        decision."""
        stage_seconds = 0.0
        for wave in range(report.waves):
            last = wave + 1 == report.waves
            wave_id = report.update_id if last else f"{report.update_id}.{wave}"
            if wave:
                self._leave_out_lost()
            began = self._clock.monotonic()
            await self._stage(wave_id, wave, report)
            stage_seconds += self._clock.monotonic() - began
            if last:
                for instance_id in self._going:
                    announced.staged(instance_id, self._digests.get(instance_id))
                if self._by_control_path():
                    await self._pin(wave_id, report.version)
                await self._decide(wave_id, announced)
                committing = self._clock.monotonic()
            await self._apply(wave_id, report, last)
        return replace(
            report,
            state="committed",
            stage_seconds=stage_seconds,
            commit_seconds=self._clock.monotonic() - committing,
            instances=self.instances(report.version),
        )

    def instances(self, version: int) -> tuple[InstanceReport, ...]:
        """Returns the outcome at each instance that took part."""
        reports = []
        for instance_id, ranks in self._instances.items():
            answer = self._answers[instance_id]
            reports.append(
                InstanceReport(
                    instance_id,
                    len(ranks),
                    answer.state,
                    version if answer.state == "committed" else None,
                    self._digests.get(instance_id),
                    answer.pause_seconds,
                    answer.error,
                )
            )
        return tuple(reports)

    def _taking_part(self) -> list[InferenceRank]:
        return [rank for ranks in self._going.values() for rank in ranks]

    def _leave_out_lost(self) -> None:
        """Removes instances with a rank that was lost since it applied a wave."""
        for ranks in list(self._going.values()):
            for rank in ranks:
                if not rank.peer.alive:
                    error = rank.peer.error or PeerLost("the connection ended")
                    answer = Answer("lost", error=f"{rank.name} was lost: {error}")
                    self._leave_out(rank.joined.instance_id, answer)
                    break

    def _leave_out(self, instance_id: str, answer: Answer) -> None:
        self._answers[instance_id] = answer
        del self._going[instance_id]
        logger.error("%r leaves the update: %s", instance_id, answer.error)
        if not self._going:
            raise WeightUpdateAborted(f"no instance is left in the update: {answer.error}")

    async def _stage(self, wave_id: str, wave: int, report: UpdateReport) -> None:
        settings = self._settings
        inference = self._taking_part()
        self.wave_id = wave_id
        members: list[Member] = [*self._training, *inference]
        self.round = current = Round(wave_id, members)
        for member in members:
            if not member.peer.alive:
                current.lose(member, member.peer.error or PeerLost("the connection ended"))
        current.check()
        prepare = Prepare(
            wave_id,
            self._plan_id,
            report.version,
            settings.stage_seconds,
            settings.digests,
            tuple(each.joined.address for each in self.leaders.values()),
            settings.policy,
            wave,
            report.waves,
        )
        for receiver in inference:
            self._links.send(receiver.peer, prepare)
        self.read = prepare.last
        for sender in self._training:
            push = Push(
                wave_id,
                self._plan_id,
                self._pushes[sender.joined.rank].serial,
                settings.stage_seconds,
                settings.digests,
                tuple(self._numbers[each.peer.id] for each in inference),
                wave,
                prepare.last,
            )
            self._links.send(sender.peer, push)
        votes = await current.all(Vote, inference, settings.stage_seconds, "staged")
        if not settings.digests:
            return
        sums = dict.fromkeys(self._going, 0)
        for member, vote in votes:
            if isinstance(member, InferenceRank):
                sums[member.joined.instance_id] += int(vote.digest or "0", 16)
        self._digests = {name: f"{each % (1 << 64):016x}" for name, each in sums.items()}

    def _by_control_path(self) -> list[InferenceRank]:
        """Returns the ranks of instances that do not commit by message."""
        return [
            rank
            for ranks in self._going.values()
            if not ranks[0].joined.by_message
            for rank in ranks
        ]

    async def _pin(self, update_id: str, version: int) -> None:
        path = self._control_path
        if path is None:
            names = ", ".join(sorted({each.name for each in self._by_control_path()}))
            raise WeightUpdateAborted(
                f"{names} commits by its engine's control path, and this coordinator has none"
            )
        try:
            async with asyncio.timeout(self._settings.commit_seconds):
                await path.pin(update_id, version)
            self.round.check()
        except Exception as error:
            await self._unpin(update_id)
            if isinstance(error, KvxferError):
                raise
            raise WeightUpdateAborted(f"not all ranks pinned it: {error}") from error

    async def _decide(self, update_id: str, announced: Announced) -> None:
        """Gets the decision. On an abort, unpins the update and raises the cause."""
        try:
            if not await announced.decide():
                raise WeightUpdateAborted("the recorded decision is to abort the update")
        except Exception:
            if self._by_control_path():
                await self._unpin(update_id)
            raise
        self.decided = True

    async def _unpin(self, update_id: str) -> None:
        path = self._control_path
        assert path is not None  # noqa: S101 (it pinned them)
        try:
            async with asyncio.timeout(self._settings.commit_seconds):
                await path.unpin(update_id)
        except Exception as error:
            self.left_pinned = update_id
            logger.warning("update %s was not unpinned: %s", update_id, error)

    async def _apply(self, wave_id: str, report: UpdateReport, last: bool) -> None:
        """Applies a wave; records which instances serve the update, and which have to leave it."""
        for leader in self.leaders.values():
            if report.waves > 1:
                self._members.note(leader.joined.instance_id, Standing("partial"))
            if leader.joined.by_message:
                self._links.send(leader.peer, Commit(wave_id))
        failed: str | None = None
        if self._by_control_path() and self._control_path is not None:
            try:
                async with asyncio.timeout(self._settings.commit_seconds):
                    await self._control_path.commit(wave_id, report.version)
            except Exception as error:
                failed = str(error) or type(error).__name__
                self.left_pinned = wave_id
                logger.error("update %s: the control path failed: %s", wave_id, error)
        answers = await asyncio.gather(
            *(
                self.round.applied(ranks, self._settings.commit_seconds)
                for ranks in self._going.values()
            )
        )
        for instance_id, answer in zip(list(self._going), answers, strict=True):
            if answer.state == "committed":
                self._answers[instance_id] = answer
                if last:
                    self._members.note(instance_id, Standing("aborted", report.version))
                continue
            if answer.state == "failed" and report.waves > 1:
                answer = answer._replace(state="partial")
            answer = answer._replace(error=answer.error or failed)
            self._members.note(instance_id, Standing(answer.state))
            if last:
                self._answers[instance_id] = answer
            else:
                self._leave_out(instance_id, answer)
