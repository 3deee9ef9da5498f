"""What leads a training job's weight updates: it has all members plan, stage and vote, and decides.

A two-phase commit (J. Gray, Notes on Data Base Operating Systems, 1978, 5.8.3): an update is
committed when every inference rank has staged it, and aborted by any loss, failure or deadline
before that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, Self

from msgspec.structs import replace

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import (
    DeadlineExceeded,
    KvxferError,
    PeerError,
    PeerLost,
    ProtocolError,
    WeightsMismatch,
    WeightUpdateAborted,
)
from kvxfer.weights.report import InstanceReport, UpdateReport
from kvxfer.weights.transfer.links import Links, logger
from kvxfer.weights.transfer.member_plan import schedule_of
from kvxfer.weights.transfer.members import InferenceRank, Members, TrainingRank
from kvxfer.weights.transfer.messages import (
    VERSION,
    Abort,
    Applied,
    Commit,
    Failed,
    Invite,
    JoinInference,
    JoinTraining,
    Message,
    Planned,
    Prepare,
    Push,
    Read,
    Ready,
    Settled,
    Vote,
    Withdraw,
    said,
)
from kvxfer.weights.transfer.registrar import (
    Announced,
    DecisionUnknown,
    NoRegistrar,
    Registrar,
)
from kvxfer.weights.transfer.round import Round
from kvxfer.weights.transfer.settings import UpdateSettings

if TYPE_CHECKING:
    from kvxfer.engine import Engine, Peer


class ControlPath(Protocol):
    """How inference engines commit that are not told by message: all ranks of an instance at one
    point between two steps. Called in this order; any of them may raise."""

    async def pin(self, update_id: str, version: int) -> None:
        """Has every rank pin the update."""

    async def commit(self, update_id: str, version: int) -> None:
        """Has every rank apply what it has pinned."""

    async def unpin(self, update_id: str) -> None:
        """Has every rank drop it, after a pin() that failed."""


_NO_PLAN: Final = -1


class WeightCoordinator:
    """One for a training job, on an engine that is used for nothing else. Event loop only.

    An update begins when all training ranks have said that they are ready, and takes all instances
    that are connected then with all of their ranks.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        trainers: int,
        receivers: Sequence[str] = (),
        control_path: ControlPath | None = None,
        registrar: Registrar | None = None,
        settings: UpdateSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """trainers: training ranks of the job. receivers: addresses of inference ranks to dial;
        others dial this engine. registrar: where updates are announced and decided."""
        self._engine = engine
        self._settings = settings or UpdateSettings()
        self._control_path = control_path
        self._registrar: Registrar = registrar or NoRegistrar()
        self._clock = clock
        self._links = Links(engine, self._message, self._lost)
        self._members = Members(trainers)
        self._ready: dict[int, Ready] = {}
        """By training rank."""
        self._readiness = asyncio.Event()
        self._lost_trainers: dict[int, PeerError] = {}
        """By training rank: those that have not joined again."""
        self._planned_at = _NO_PLAN
        self._plan_id = ""
        self._bytes = 0
        self._round: Round | None = None
        self._served = 0
        for address in receivers:
            self._links.spawn(self._links.keep_connected(address, self._invite))
        self._links.spawn(self._lead())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._links.close()

    async def joined(self, instances: int, timeout: float) -> None:
        """Returns when all training ranks and so many instances are connected. Raises
        DeadlineExceeded that says who is missing."""
        try:
            async with asyncio.timeout(timeout):
                while self._members.missing_trainers() or len(self._members.instances) < instances:
                    await self._members.change()
        except TimeoutError:
            raise DeadlineExceeded(
                f"after {timeout:g} s {len(self._members.instances)} of {instances} instances are "
                f"connected, and training ranks {self._members.missing_trainers()} are missing"
            ) from None

    # --- messages

    def _message(self, peer: Peer, message: Message) -> None:
        match message:
            case JoinTraining() | JoinInference():
                self._join(peer, message)
            case Ready():
                self._ready_said(peer, message)
            case Withdraw():
                self._withdrawn(peer, message)
            case Planned() | Vote() | Failed() | Applied() | Read():
                member = self._members.of(peer)
                if self._round is not None and member is not None:
                    self._round.take(member, message)
            case _:
                raise ProtocolError(f"{peer.name!r} sent {type(message).__name__} to a coordinator")

    def _invite(self, peer: Peer) -> None:
        self._links.send(peer, Invite())

    def _join(self, peer: Peer, joined: JoinTraining | JoinInference) -> None:
        if joined.version != VERSION:
            raise ProtocolError(
                f"{peer.name!r} speaks version {joined.version} of weight updates, and this "
                f"coordinator {VERSION}; run the same version of kvxfer on both"
            )
        before = self._members.add(peer, joined)
        if before is not None and self._round is not None:
            self._round.lose(before, PeerLost("it has connected anew"))
        if isinstance(joined, JoinInference):
            self._served = max(self._served, joined.serves)
        else:
            self._lost_trainers.pop(joined.rank, None)

    def _ready_said(self, peer: Peer, ready: Ready) -> None:
        member = self._members.of(peer)
        if isinstance(member, TrainingRank):
            self._ready[member.joined.rank] = ready
            self._readiness.set()

    def _withdrawn(self, peer: Peer, withdraw: Withdraw) -> None:
        member = self._members.of(peer)
        if not isinstance(member, TrainingRank):
            return
        ready = self._ready.get(member.joined.rank)
        if ready is not None and ready.serial == withdraw.serial:
            del self._ready[member.joined.rank]
            self._readiness.set()
            if self._round is not None:
                self._round.fail(WeightUpdateAborted(f"{member.name} has withdrawn its push"))

    def _lost(self, peer: Peer, error: PeerError) -> None:
        member = self._members.remove(peer)
        if member is None:
            return
        if isinstance(member, TrainingRank):
            self._ready.pop(member.joined.rank, None)
            self._lost_trainers[member.joined.rank] = type(error)(
                f"{member.name} was lost: {error}"
            )
            self._readiness.set()
        if self._round is not None:
            self._round.lose(member, error)

    # --- updates

    async def _lead(self) -> None:
        while True:
            await self._all_begin()
            try:
                version = await self._all_ready()
                ready = dict(self._ready)
                report = await self._update(version)
            except Exception as error:  # nothing has been told to begin
                why = said(error)
                report = UpdateReport("none", 0, "aborted", 0, error=why.text, code=why.code)
                ready = dict(self._ready)
                logger.warning("no weight update: %s", error)
            for each in self._members.training:
                of_rank = ready.get(each.joined.rank)
                if of_rank is not None:
                    self._links.send(each.peer, Settled(of_rank.serial, report))
            # A rank that has withdrawn may be ready again.
            self._ready = {
                rank: each for rank, each in self._ready.items() if each is not ready.get(rank)
            }

    async def _all_begin(self) -> None:
        """A first training rank is ready."""
        while not self._ready:
            self._readiness.clear()
            await self._readiness.wait()

    async def _all_ready(self) -> int:
        """The version that all training ranks have."""
        seconds = self._settings.ready_seconds
        try:
            async with asyncio.timeout(seconds):
                while missing := self._not_ready():
                    self._readiness.clear()
                    await self._readiness.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"training ranks {missing} have not pushed within {seconds:g} s of the first"
            ) from None
        versions = sorted({each.weights for each in self._ready.values()})
        if len(versions) > 1:
            raise WeightsMismatch(f"training ranks push the versions {versions}; push one")
        if versions[0] <= self._served:
            raise WeightsMismatch(
                f"version {versions[0]} is pushed, and {self._served} is served; push a greater one"
            )
        return versions[0]

    def _not_ready(self) -> list[int]:
        known = {each.joined.rank for each in self._members.training if each.peer.alive}
        missing = set(self._members.missing_trainers()) | (known - set(self._ready))
        for error in self._lost_trainers.values():
            raise type(error)(str(error))
        if not self._ready:  # the last one that was ready has withdrawn, or is lost
            raise WeightUpdateAborted("no training rank is ready any more")
        return sorted(missing)

    async def _update(self, version: int) -> UpdateReport:
        update_id = f"{version}-{secrets.token_hex(4)}"
        report = UpdateReport(update_id, version, "aborted", 0)
        try:
            if self._planned_at != self._members.generation:
                began = self._clock.monotonic()
                await self._plan()
                report = replace(report, plan_seconds=self._clock.monotonic() - began)
            report = replace(report, nbytes=self._bytes)
            names = list(self._members.instances)
            async with self._registrar.announce(update_id, version, names) as announced:
                return await self._announced(report, announced)
        except DecisionUnknown as error:
            # Members that lose the coordinator ask for the decision themselves.
            for each in self._members:
                each.peer.close()
            return self._aborted(report, error)
        except KvxferError as error:
            for each in self._members:
                self._links.send(each.peer, Abort(update_id, said(error)))
            return self._aborted(report, error)
        finally:
            self._round = None

    async def _announced(self, report: UpdateReport, announced: Announced) -> UpdateReport:
        self._round = current = Round(self._members.taking_part)
        began = self._clock.monotonic()
        digests = await self._stage(report.update_id, report.version)
        for instance_id in current.instances():
            announced.staged(instance_id, digests.get(instance_id))
        report = replace(report, stage_seconds=self._clock.monotonic() - began)
        if self._by_control_path():
            await self._pin(report.update_id, report.version)
        if not await announced.decide():
            raise WeightUpdateAborted("it was recorded that the update is aborted")
        # From here on it is committed, also if members are lost.
        self._served = report.version
        began = self._clock.monotonic()
        instances = await self._committed(report.update_id, report.version, digests)
        report = replace(
            report,
            state="committed",
            commit_seconds=self._clock.monotonic() - began,
            instances=instances,
        )
        await announced.ended(report)
        return report

    def _aborted(self, report: UpdateReport, error: KvxferError) -> UpdateReport:
        instances = tuple(
            InstanceReport(instance_id, len(ranks), "aborted", ranks[0].joined.serves)
            for instance_id, ranks in self._members.instances.items()
        )
        return replace(report, error=str(error), code=error.code, instances=instances)

    async def _plan(self) -> None:
        if not self._members.instances:
            raise WeightUpdateAborted(
                "no instance is connected with all of its ranks; start one, or give its address"
            )
        plan_id = secrets.token_hex(8)
        generation = self._members.generation
        plan = self._members.plan(plan_id, self._settings.schedule)
        figures = (await asyncio.to_thread(schedule_of, plan)).figures
        if generation != self._members.generation:
            raise WeightUpdateAborted("a member was lost or came while the update was planned")
        self._round = Round(self._members.taking_part)
        for number, sender in enumerate(self._members.training):
            self._links.send(sender.peer, replace(plan, number=number))
        for number, receiver in enumerate(self._members.inference):
            self._links.send(receiver.peer, replace(plan, number=number))
        await self._round.all(
            Planned, self._members.taking_part, self._settings.plan_seconds, "made the plan"
        )
        self._planned_at, self._plan_id, self._bytes = generation, plan_id, figures.nbytes

    async def _stage(self, update_id: str, version: int) -> dict[str, str]:
        """The digest of each instance."""
        assert self._round is not None  # noqa: S101
        settings = self._settings
        inference = self._members.inference
        leaders = tuple(
            each.joined.address
            for each in inference
            if each.joined.rank == 0 and each.joined.by_message
        )
        for receiver in inference:
            self._links.send(
                receiver.peer,
                Prepare(
                    update_id,
                    self._plan_id,
                    version,
                    settings.stage_seconds,
                    settings.digests,
                    leaders,
                    settings.policy,
                ),
            )
        for sender in self._members.training:
            self._links.send(
                sender.peer,
                Push(
                    update_id,
                    self._plan_id,
                    self._ready[sender.joined.rank].serial,
                    settings.stage_seconds,
                    settings.digests,
                ),
            )
        votes = await self._round.all(Vote, inference, settings.stage_seconds, "staged")
        if not settings.digests:
            return {}
        sums: dict[str, int] = {}
        for member, vote in votes:
            if isinstance(member, InferenceRank):
                instance_id = member.joined.instance_id
                sums[instance_id] = sums.get(instance_id, 0) + int(vote.digest or "0", 16)
        return {instance_id: f"{each % (1 << 64):016x}" for instance_id, each in sums.items()}

    def _by_control_path(self) -> list[InferenceRank]:
        """The ranks of instances that are not committed by message."""
        return [
            rank
            for ranks in self._members.instances.values()
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
            if self._round is not None:
                self._round.check()
        except Exception as error:
            try:
                async with asyncio.timeout(self._settings.commit_seconds):
                    await path.unpin(update_id)
            except Exception as again:
                logger.warning("update %s was not unpinned: %s", update_id, again)
            if isinstance(error, KvxferError):
                raise
            raise WeightUpdateAborted(f"not all ranks pinned it: {error}") from error

    async def _committed(
        self, update_id: str, version: int, digests: dict[str, str]
    ) -> tuple[InstanceReport, ...]:
        assert self._round is not None  # noqa: S101
        current = self._round
        instances = current.instances()
        for ranks in instances.values():
            if ranks[0].joined.by_message:
                self._links.send(ranks[0].peer, Commit(update_id))
        failed: str | None = None
        if self._by_control_path() and self._control_path is not None:
            try:
                async with asyncio.timeout(self._settings.commit_seconds):
                    await self._control_path.commit(update_id, version)
            except Exception as error:
                failed = str(error) or type(error).__name__
                logger.error("update %s: the control path failed: %s", update_id, error)
        answers = await asyncio.gather(
            *(current.applied(ranks, self._settings.commit_seconds) for ranks in instances.values())
        )
        return tuple(
            InstanceReport(
                instance_id,
                len(ranks),
                answer.state,
                version if answer.state == "committed" else None,
                digests.get(instance_id),
                answer.pause_seconds,
                answer.error or (failed if answer.state != "committed" else None),
            )
            for (instance_id, ranks), answer in zip(instances.items(), answers, strict=True)
        )
