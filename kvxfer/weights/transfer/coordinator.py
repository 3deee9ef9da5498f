"""The coordinator of a training job: knows the members, makes them plan, and runs updates."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from msgspec.structs import replace

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import (
    DeadlineExceeded,
    DecisionUnknown,
    EngineError,
    InvalidArgument,
    KvxferError,
    PeerLost,
    ProtocolError,
    WeightsMismatch,
    WeightUpdateAborted,
)
from kvxfer.weights.report import InstanceReport, UpdateReport
from kvxfer.weights.transfer.execution import ControlPath, Execution
from kvxfer.weights.transfer.links import LASTING, Links, logger
from kvxfer.weights.transfer.member_plan import schedule_of, waves_in
from kvxfer.weights.transfer.members import InferenceRank, Members, TrainingRank
from kvxfer.weights.transfer.messages import (
    VERSION,
    Abort,
    Applied,
    Failed,
    Invite,
    JoinInference,
    JoinTraining,
    Message,
    Plan,
    Planned,
    Read,
    Ready,
    Settled,
    Vote,
    Withdraw,
    said,
)
from kvxfer.weights.transfer.readiness import Readiness
from kvxfer.weights.transfer.registrar import NoRegistrar, Registrar
from kvxfer.weights.transfer.round import Round
from kvxfer.weights.transfer.settings import UpdateSettings

if TYPE_CHECKING:
    from kvxfer.engine import Engine, Peer


_NO_PLAN: Final = -1
_MORE_TRIES: Final = 1
"""Further tries of an update that has failed after some instances applied a wave."""


class WeightCoordinator:
    """The coordinator of one training job, on an engine used for nothing else. Event loop only.

    An update begins when all training ranks have sent READY. It includes the instances whose ranks
    are all connected then.
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
        """trainers: the number of training ranks. receivers: addresses of inference ranks to dial;
        others dial this engine. registrar: announces updates and records decisions."""
        if isinstance(receivers, str):
            raise InvalidArgument(f"receivers is {receivers!r}; pass a list of addresses")
        self._engine = engine
        self._settings = settings or UpdateSettings()
        self._control_path = control_path
        self._registrar: Registrar = registrar or NoRegistrar()
        self._clock = clock
        self._links = Links(engine, self._message, self._lost)
        self._members = Members(trainers)
        self._readiness = Readiness(self._members)
        self._planned_at = _NO_PLAN
        self._plan_id = ""
        self._waves = 1
        self._bytes = 0
        self._planning: Round | None = None
        self._execution: Execution | None = None
        self._served = 0
        self._left_pinned: str | None = None
        self._read = False
        """Whether the memory of training ranks may have changed since they pushed."""
        self._dialed: dict[str, KvxferError | None] = dict.fromkeys(receivers)
        """The error, or None, of the last attempt to connect to each receiver's address."""
        for address in receivers:
            told = partial(self._tried, address)
            self._links.spawn(self._links.keep_connected(address, self._invite, told))
        self._links.spawn(self._lead())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._links.close()

    async def joined(self, instances: int, timeout: float) -> None:
        """Waits until all training ranks and `instances` instances are connected. Raises
        DeadlineExceeded that names the missing ones, with the last error of connecting as its
        cause. Raises an error of connecting at once if another attempt would not change it."""
        try:
            async with asyncio.timeout(timeout):
                while self._members.missing_trainers() or len(self._members.instances) < instances:
                    for error in self._dialed.values():
                        if isinstance(error, LASTING):
                            raise error
                    await self._members.change()
        except TimeoutError:
            failed = [error for error in self._dialed.values() if error is not None]
            raise DeadlineExceeded(
                f"after {timeout:g} s {len(self._members.instances)} of {instances} instances are "
                f"connected: {'; '.join(self._absences()) or 'no other rank has joined'}"
            ) from (failed[-1] if failed else None)

    def _absences(self) -> Iterator[str]:
        """Yields what is missing, with the reason if known."""
        for rank in self._members.missing_trainers():
            yield f"training rank {rank} has not joined"
        yield from self._members.incomplete()
        joined = {each.joined.address for each in self._members if isinstance(each, InferenceRank)}
        for address, error in self._dialed.items():
            if error is not None:
                yield str(error)
            elif address not in joined:
                yield f"no weight receiver has joined from {address}"

    def _tried(self, address: str, error: KvxferError | None) -> None:
        self._dialed[address] = error
        self._members.stir()

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

    @property
    def _round(self) -> Round | None:
        """The round whose answers are awaited."""
        return self._planning if self._execution is None else self._execution.round

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
            self._round.lose(before, PeerLost("it has connected again"))
        if isinstance(joined, JoinInference):
            self._served = max(self._served, joined.serves)
        else:
            self._readiness.joined(joined.rank)

    def _ready_said(self, peer: Peer, ready: Ready) -> None:
        member = self._members.of(peer)
        if isinstance(member, TrainingRank):
            self._readiness.take(member, ready)

    def _withdrawn(self, peer: Peer, withdraw: Withdraw) -> None:
        member = self._members.of(peer)
        if not isinstance(member, TrainingRank):
            return
        if self._readiness.withdraw(member, withdraw) and self._round is not None:
            self._round.fail(WeightUpdateAborted(f"{member.name} has withdrawn its push"))

    def _lost(self, peer: Peer, error: EngineError) -> None:
        member = self._members.remove(peer)
        if member is None:
            return
        if isinstance(member, TrainingRank):
            self._readiness.lose(member, error)
        if self._round is not None:
            self._round.lose(member, error)

    # --- updates

    async def _lead(self) -> None:
        while True:
            await self._readiness.first()
            try:
                version = await self._readiness.all(self._settings.ready_seconds)
                if version <= self._served:
                    raise WeightsMismatch(
                        f"version {version} is pushed, and {self._served} is served; push a "
                        "greater one"
                    )
                pushes = self._readiness.pushes()
                report = await self._carried_out(version, pushes)
            except Exception as error:  # no member has been told to begin
                pushes = self._readiness.pushes()
                version = max((each.weights for each in pushes.values()), default=0)
                report = self._aborted(self._begun(version), error)
                logger.warning("no weight update: %s", error)
            for each in self._members.training:
                of_rank = pushes.get(each.joined.rank)
                if of_rank is not None:
                    told = replace(report, version=of_rank.weights)
                    self._links.send(each.peer, Settled(of_rank.serial, told))
            self._readiness.settle(pushes)

    async def _carried_out(self, version: int, pushes: dict[int, Ready]) -> UpdateReport:
        report = await self._update(version, pushes)
        for _ in range(_MORE_TRIES):
            # Instances that have only some waves are out of service until a whole update. Try again
            # at once, if the memory of the training ranks may still be read.
            if not report.out_of_service or self._read or self._readiness.pushes() != pushes:
                break
            logger.warning("update %s is tried again: %s", report.update_id, report.error)
            report = await self._update(version, pushes)
        return report

    def _begun(self, version: int) -> UpdateReport:
        update_id = f"{version}-{secrets.token_hex(4)}"
        return UpdateReport(update_id, version, "aborted", 0, mode=self._settings.mode)

    async def _update(self, version: int, pushes: dict[int, Ready]) -> UpdateReport:
        report = self._begun(version)
        update_id = report.update_id
        self._read = False
        try:
            await self._unpin_left()
            if self._planned_at != self._members.generation:
                began = self._clock.monotonic()
                await self._plan()
                report = replace(report, plan_seconds=self._clock.monotonic() - began)
            report = replace(report, nbytes=self._bytes, waves=self._waves)
            names = list(self._members.instances)
            async with self._registrar.announce(update_id, version, names) as announced:
                if self._planned_at != self._members.generation:
                    raise WeightUpdateAborted("a member was lost or joined before the update began")
                self._execution = Execution(
                    self._links,
                    self._members,
                    pushes,
                    self._plan_id,
                    self._settings,
                    self._control_path,
                    self._clock,
                )
                report = await self._execution.run(report, announced)
                # If no instance is known to serve the version, COMMIT may have reached no leader,
                # and the leaders may have agreed to abort. Those that serve it say so when they
                # join.
                if any(each.state == "committed" for each in report.instances):
                    self._served = version
                await announced.ended(report)
                return report
        except DecisionUnknown as error:
            # Members that lose the coordinator ask for the decision themselves.
            for each in self._members:
                each.peer.close()
            return self._aborted(report, error)
        except Exception as error:
            if self._execution is not None and self._execution.decided:
                logger.exception("update %s is committed, and its report failed", update_id)
                return replace(report, state="committed", error=str(error))
            wave_id = update_id if self._execution is None else self._execution.wave_id
            for each in self._members:
                self._links.send(each.peer, Abort(wave_id, said(error)))
            return self._aborted(report, error)
        finally:
            if self._execution is not None:
                self._left_pinned = self._execution.left_pinned
            self._read = self._execution is not None and self._execution.read
            self._planning = self._execution = None

    async def _unpin_left(self) -> None:
        """Unpins an update that ranks may still have pinned: they would refuse the next one."""
        left, path = self._left_pinned, self._control_path
        if left is not None and path is not None:
            try:
                async with asyncio.timeout(self._settings.commit_seconds):
                    await path.unpin(left)
            except Exception as error:
                raise WeightUpdateAborted(
                    f"instances still have update {left} pinned, and cannot be told to drop it: "
                    f"{error or type(error).__name__}"
                ) from error
        self._left_pinned = None

    def _aborted(self, report: UpdateReport, error: Exception) -> UpdateReport:
        why = said(error)
        instances = tuple(
            InstanceReport(instance_id, len(ranks), *self._members.standing(instance_id))
            for instance_id, ranks in self._members.instances.items()
        )
        return replace(report, error=why.text, code=why.code, instances=instances)

    async def _plan(self) -> None:
        if not self._members.instances:
            raise WeightUpdateAborted(
                "no instance is connected with all of its ranks; start one, or give its address"
            )
        plan_id = secrets.token_hex(8)
        generation = self._members.generation
        plan = self._members.plan(plan_id, self._settings)
        try:
            nbytes = await asyncio.to_thread(_sent_bytes, plan)
        except InvalidArgument as error:  # the members' holdings are its arguments
            raise WeightsMismatch(str(error)) from error
        if generation != self._members.generation:
            raise WeightUpdateAborted("a member was lost or joined while the update was planned")
        self._planning = Round(plan_id, self._members.taking_part)
        for number, sender in enumerate(self._members.training):
            self._links.send(sender.peer, replace(plan, number=number))
        for number, receiver in enumerate(self._members.inference):
            self._links.send(receiver.peer, replace(plan, number=number))
        await self._planning.all(
            Planned, self._members.taking_part, self._settings.plan_seconds, "made the plan"
        )
        self._planned_at, self._plan_id, self._bytes = generation, plan_id, nbytes
        self._waves = max(len(plan.waves), 1)


def _sent_bytes(plan: Plan) -> int:
    return sum(schedule_of(wave).figures.nbytes for wave in waves_in(plan))
