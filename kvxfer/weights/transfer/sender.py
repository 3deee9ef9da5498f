"""The training side of weight updates: writes from its memory on the coordinator's order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from kvxfer.errors import (
    EngineError,
    InvalidArgument,
    KvxferError,
    OldVersion,
    PeerError,
    PeerLost,
    ProtocolError,
    WeightsMismatch,
    WeightUpdateAborted,
    WeightUpdateError,
)
from kvxfer.own_thread import in_own_thread
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.transfer.endings import until_ended
from kvxfer.weights.transfer.links import JOIN_SECONDS, Links
from kvxfer.weights.transfer.member_plan import schedule_of, sent_by, waves_in
from kvxfer.weights.transfer.messages import (
    Abort,
    Failed,
    Grant,
    Hello,
    JoinTraining,
    Message,
    Plan,
    Planned,
    Push,
    Read,
    Ready,
    Settled,
    Target,
    Withdraw,
    said,
)
from kvxfer.weights.transfer.sending import Receiver, Sending, Writes, batches_of

if TYPE_CHECKING:
    from kvxfer.engine import Engine, MemoryRegion, Peer

_CONNECT_SECONDS: Final = 10.0
_AWAY_SECONDS: Final = 1.0
_EARLY_UPDATES: Final = 8


class Pushed(NamedTuple):
    """A push of one rank."""

    read: asyncio.Future[None]
    """A future that ends once this rank's memory is no longer read, however the update ends."""
    report: asyncio.Future[UpdateReport]
    """The report, once all instances have answered; an error with the whole `report`, if no
    instance serves the version; or the loss of the coordinator."""


class _Push:
    def __init__(self, version: int, serial: int) -> None:
        loop = asyncio.get_running_loop()
        self.version, self.serial = version, serial
        self.pushed = Pushed(loop.create_future(), loop.create_future())
        self.update_id = ""
        self.sending: Sending | None = None
        self.task: asyncio.Task[None] | None = None
        # A caller may never look at `report`: its error counts as retrieved.
        self.pushed.report.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


class WeightSender:
    """The sender of one training rank, on an engine used for nothing else. Event loop only."""

    def __init__(self, engine: Engine, holdings: Holdings, rank: int) -> None:
        """holdings: what this rank has, whether it sends it or not."""
        self._engine = engine
        self.holdings = holdings
        self._rank = rank
        self._links = Links(engine, self._message, self._lost)
        self._coordinator: Peer | None = None
        self._regions: dict[str, MemoryRegion] = {}
        self._plan_id = ""
        self._receivers: dict[int, Receiver] = {}
        self._waves: list[dict[int, Writes]] = []
        """The writes of this rank in each wave, by number of the receiver."""
        self._early: dict[str, list[tuple[Peer, Grant]]] = {}
        self._push: _Push | None = None
        self._serial = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stops the push that is under way. No memory is read afterwards."""
        push, self._push = self._push, None
        if push is not None:
            await self._stop(push, PeerLost("this training rank was closed"))
        await self._links.close()
        for region in self._regions.values():
            await in_own_thread(region.close)
        self._regions.clear()

    async def join(self, coordinator: str, timeout: float = JOIN_SECONDS) -> None:
        """Dials a coordinator, and again after each loss. Raises DeadlineExceeded, and at once an
        error of connecting that another attempt would not change."""
        await self._links.join(coordinator, self._join, timeout)

    def push(self, version: int, tensors: Mapping[str, Any]) -> Pushed:
        """Pushes the version that the memory of these tensors has. The memory may be read until
        `read` has ended.

        tensors: the boxes of the holdings, by name, contiguous. Memory at the same address as in
        the previous push is not registered again.
        Raises InvalidArgument if another push is under way. Raises it also for a tensor that is
        missing or is not the box of its holding; the pushes of all other ranks then fail with that
        reason.
        """
        if self._push is not None:
            raise InvalidArgument(
                f"the push of version {self._push.version} has not ended; wait for its result"
            )
        try:
            self._register(tensors)
        except Exception as error:
            self.refuse(version, error)
            raise
        self._serial += 1
        self._push = _Push(version, self._serial)
        if not self._links.send(self._coordinator, Ready(version, self._serial)):
            self._links.spawn(self._await_coordinator(self._push))
        return self._push.pushed

    def refuse(self, version: int, error: BaseException) -> None:
        """Reports that this rank cannot push the version. The pushes of all other ranks fail with
        this error; none of them waits for this rank."""
        self._serial += 1
        self._links.send(self._coordinator, Ready(version, self._serial, said(error)))

    async def withdraw(self, error: KvxferError) -> None:
        """Withdraws the push that is under way; its report fails with this error."""
        push = self._push
        if push is not None:
            self._links.send(self._coordinator, Withdraw(push.serial))
            self._push = None
            await self._stop(push, error)

    def _register(self, tensors: Mapping[str, Any]) -> None:
        for holding in self.holdings.parameters:
            if holding.name not in tensors:
                raise InvalidArgument(f"{holding.name} is missing among the tensors of this push")
            tensor = tensors[holding.name]
            _require_box(holding, tensor)
            known = self._regions.get(holding.name)
            address = _address_of(tensor)
            if known is not None and address is not None and known.address == address:
                continue
            if known is not None:
                known.close()
                del self._regions[holding.name]
            region = self._engine.register(tensor)
            if region.nbytes != holding.nbytes:
                region.close()
                raise InvalidArgument(
                    f"{holding.name} has {region.nbytes} bytes; a box of {list(holding.shape)} "
                    f"{holding.dtype} has {holding.nbytes}"
                )
            self._regions[holding.name] = region

    # --- messages

    def _message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Grant):
            self._granted(peer, message)
            return
        if peer is not self._coordinator:
            raise ProtocolError(
                f"{peer.name!r} is not the coordinator of training rank {self._rank}"
            )
        match message:
            case Plan():
                self._links.spawn(self._make_plan(peer, message))
            case Push():
                self._begin(peer, message)
            case Abort():
                # SETTLED follows with the reason, or another try follows.
                push = self._push
                if push is not None and push.update_id == message.update_id and push.task:
                    push.task.cancel()
            case Settled():
                self._settled(message)
            case _:
                raise ProtocolError(f"{peer.name!r} sent {type(message).__name__} to a sender")

    def _join(self, coordinator: Peer) -> None:
        self._coordinator = coordinator
        self._links.send(coordinator, JoinTraining(self._rank, self.holdings))
        if self._push is not None:
            self._links.send(coordinator, Ready(self._push.version, self._push.serial))

    async def _make_plan(self, coordinator: Peer, plan: Plan) -> None:
        try:
            waves = await asyncio.to_thread(_sent, plan)
            receivers = {number for writes in waves for number in writes}
            self._receivers = await self._connected(plan, receivers)
        except Exception as error:
            self._links.send(coordinator, Planned(plan.plan_id, said(error)))
            return
        self._plan_id, self._waves = plan.plan_id, waves
        self._links.send(coordinator, Planned(plan.plan_id))

    async def _connected(self, plan: Plan, numbers: set[int]) -> dict[int, Receiver]:
        """Connects to inference ranks of the plan."""

        async def meet(number: int) -> tuple[int, Receiver]:
            hello = Hello(plan.plan_id, plan.number)
            target = plan.targets[number]
            return number, Receiver(await self._met(target, hello), target, hello)

        return dict(await asyncio.gather(*map(meet, numbers)))

    async def _met(self, target: Target, hello: Hello) -> Peer:
        try:
            peer = await self._engine.connect(target.address, timeout=_CONNECT_SECONDS)
        except PeerError as error:
            raise type(error)(f"{target.name} cannot be reached: {error}") from error
        self._links.send(peer, hello)
        return peer

    async def _writes(self, message: Push) -> list[tuple[Receiver, Writes]]:
        """Returns the writes of a wave. Dials receivers that were lost since the plan was made."""
        found = []
        for number, writes in self._waves[message.wave].items():
            if number not in message.receivers:
                continue
            receiver = self._receivers[number]
            if not receiver.peer.alive:
                peer = await self._met(receiver.target, receiver.hello)
                self._receivers[number] = receiver = receiver._replace(peer=peer)
            found.append((receiver, writes))
        return found

    def _begin(self, coordinator: Peer, message: Push) -> None:
        push = self._push
        if (
            push is None
            or push.serial != message.serial
            or push.pushed.read.done()
            or self._plan_id != message.plan_id
        ):
            why = WeightUpdateAborted(
                f"training rank {self._rank} is not ready to send update {message.update_id}"
            )
            self._links.send(coordinator, Failed(message.update_id, said(why)))
            return
        push.update_id, push.sending = message.update_id, None
        push.task = self._links.spawn(self._send(coordinator, push, message, push.task))

    def _granted(self, peer: Peer, grant: Grant) -> None:
        push = self._push
        if push is not None and push.sending is not None and push.update_id == grant.update_id:
            push.sending.granted(peer, grant)
            return
        # The grant of an inference rank may come before the coordinator's order.
        self._early.setdefault(grant.update_id, []).append((peer, grant))
        while len(self._early) > _EARLY_UPDATES:
            del self._early[next(iter(self._early))]

    async def _send(
        self,
        coordinator: Peer,
        push: _Push,
        message: Push,
        before: asyncio.Task[None] | None,
    ) -> None:
        try:
            if before is not None:  # the wave before: written, or cancelled
                await until_ended(before)
            sending = Sending(self._links, message, await self._writes(message), self._regions)
            for peer, grant in self._early.pop(message.update_id, []):
                sending.granted(peer, grant)
            push.sending = sending
            await sending.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # Another try may read the memory again, until SETTLED.
            self._links.send(coordinator, Failed(message.update_id, said(error)))
            return
        if message.last and not push.pushed.read.done():
            push.pushed.read.set_result(None)
        self._links.send(coordinator, Read(message.update_id))

    def _settled(self, message: Settled) -> None:
        push, report = self._push, message.report
        if push is None or push.serial != message.serial:
            return
        if report.state == "aborted":
            what = "and instances keep serving the version before"
            if report.out_of_service:
                names = ", ".join(map(repr, report.out_of_service))
                what = f"and {names} is out of service until the next one"
            text = f"the update to version {push.version} was {{}}, {what}: {report.error}"
            error: WeightUpdateError = WeightUpdateAborted(text.format("aborted"))
            if report.code in (WeightsMismatch.code, OldVersion.code):  # a retry is refused
                error = WeightsMismatch(text.format("refused"))
            error.report = report
            self._end(error)
            return
        self._push = None
        if not push.pushed.read.done():
            push.pushed.read.set_result(None)
        if not push.pushed.report.done():
            push.pushed.report.set_result(report)

    def _end(self, error: KvxferError) -> None:
        """Ends the push that is under way with an error, before it is committed."""
        push, self._push = self._push, None
        if push is not None:
            self._links.spawn(self._stop(push, error))

    async def _stop(self, push: _Push, error: KvxferError) -> None:
        try:
            await _stopped(push)
        finally:
            if not push.pushed.report.done():
                push.pushed.report.set_exception(error)

    def _lost(self, peer: Peer, error: EngineError) -> None:
        if peer is not self._coordinator:
            return
        self._coordinator = None
        self._end(type(error)(f"the coordinator of weight updates was lost: {error}"))

    async def _await_coordinator(self, push: _Push) -> None:
        """Ends the push if no coordinator is connected for _AWAY_SECONDS."""
        await asyncio.sleep(_AWAY_SECONDS)
        if self._push is push and self._coordinator is None:
            self._end(PeerLost(f"no coordinator of weight updates for {_AWAY_SECONDS:g} s"))


async def _stopped(push: _Push) -> None:
    """Stops a push. Its memory is no longer read once this returns."""
    try:
        if push.task is not None:
            push.task.cancel()
            await until_ended(push.task)
    finally:
        if not push.pushed.read.done():
            push.pushed.read.set_result(None)


def _sent(plan: Plan) -> list[dict[int, Writes]]:
    """Returns the writes of each wave, by number of the receiver."""
    return [
        {
            number: Writes(bursts, batches_of(bursts))
            for number, bursts in sent_by(schedule_of(wave), wave, plan.number).items()
        }
        for wave in waves_in(plan)
    ]


def _require_box(holding: Holding, tensor: Any) -> None:
    """Raises InvalidArgument for a torch tensor that is not the box of the holding."""
    if not hasattr(tensor, "data_ptr"):
        return
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape) or (1,)
    if (dtype, shape) != (holding.dtype, holding.shape):
        raise InvalidArgument(
            f"{holding.name} is {dtype} of {list(shape)} in this push, and {holding.dtype} of "
            f"{list(holding.shape)} among the holdings; pass a tensor like that, or make a new "
            "Trainer at all ranks"
        )
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{holding.name} is not contiguous; pass tensor.contiguous()")


def _address_of(tensor: Any) -> int | None:
    """Returns the address of a torch tensor or a numpy array; None for something else."""
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    interface = getattr(tensor, "__array_interface__", None)
    return None if interface is None else int(interface["data"][0])
