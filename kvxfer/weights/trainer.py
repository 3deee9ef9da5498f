"""Weight updates for training loops; a thread runs the asynchronous parts.

state = state_of(model)
trainer = Trainer(state.holdings, state.staged, rank=rank, world_size=ranks, cluster_key=key)
for version in range(1, steps):
    train(model)
    push = trainer.push(version)
    push.read()                 # the next step may write to the parameters
    report = push.result()      # all instances serve them
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias, TypeVar, Unpack

from kvxfer.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidArgument,
    KvxferError,
    WeightUpdateAborted,
)
from kvxfer.loop_thread import START_SECONDS, LoopThread
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.transfer.coordinator import WeightCoordinator
from kvxfer.weights.transfer.execution import ControlPath
from kvxfer.weights.transfer.registrar import Registrar
from kvxfer.weights.transfer.sender import WeightSender
from kvxfer.weights.transfer.settings import UpdateSettings

if TYPE_CHECKING:
    from kvxfer.engine import Engine, EngineOptions

T = TypeVar("T")

_Awaited: TypeAlias = concurrent.futures.Future

_CALL_SECONDS: Final = 60.0
_JOIN_SECONDS: Final = 0.75 * START_SECONDS


class SyncControlPath(Protocol):
    """A ControlPath (`transfer.execution`) of blocking calls."""

    def pin(self, update_id: str, version: int) -> None: ...

    def commit(self, update_id: str, version: int) -> None: ...

    def unpin(self, update_id: str) -> None: ...


class Push:
    """One push of one training rank. Any thread."""

    def __init__(self, version: int, read: _Awaited[None], report: _Awaited[UpdateReport]) -> None:
        self.version = version
        self._read, self._report = read, report

    def read(self, timeout: float | None = None) -> None:
        """Waits until the parameters of this rank are no longer read, and may be changed. Raises
        DeadlineExceeded after `timeout` seconds."""
        _result(self._read, timeout, f"the parameters of version {self.version} are still read")

    def result(self, timeout: float | None = None) -> UpdateReport:
        """Waits until all instances that took part have answered, and returns the report. An
        instance that failed or was lost after the decision is named there, and out of service.

        Raises WeightUpdateAborted or WeightsMismatch if no instance serves the version: after the
        first, it can be pushed again; after the second, it would be refused again. Raises PeerError
        if the coordinator was lost, and DeadlineExceeded after `timeout` seconds.
        """
        return _result(self._report, timeout, f"the update to {self.version} has not ended")

    def done(self) -> bool:
        """Returns whether result() returns or raises at once."""
        return self._report.done()


class Trainer:
    """The weight updates of one training rank. Any thread, one at a time.

    Rank 0 also hosts the coordinator: give its `coordinator` address to the other ranks, and to
    inference ranks that dial it. close() ends the engines and their thread.
    """

    def __init__(
        self,
        holdings: Holdings,
        tensors: Callable[[], Mapping[str, Any]],
        *,
        rank: int,
        world_size: int,
        cluster_key: str | bytes,
        coordinator: str | None = None,
        receivers: Sequence[str] = (),
        control_path: SyncControlPath | None = None,
        registrar: Registrar | None = None,
        settings: UpdateSettings | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """holdings: what this rank has. tensors: returns what it sends at a push, by the names of
        the holdings, contiguous.

        coordinator: the `coordinator` address of rank 0; None at rank 0. options: those of the
        engines; at rank 0, the port is the coordinator's.
        For rank 0 alone: receivers: addresses of inference ranks to dial. control_path: commits at
        instances that do not commit by message. registrar: announces updates and records decisions,
        such as `kvxfer.client.ControlPlaneRegistrar`. settings: those of the updates.
        Raises InvalidArgument, DeadlineExceeded, and what the engine raises.
        """
        if (rank == 0) != (coordinator is None):
            raise InvalidArgument(
                f"training rank {rank} has coordinator={coordinator!r}; rank 0 hosts it and has "
                "None, all others have its address"
            )
        self._tensors = tensors
        self._push: Push | None = None
        self._thread = _TrainerThread(
            rank,
            world_size,
            holdings,
            coordinator,
            receivers,
            control_path,
            registrar,
            settings,
            cluster_key,
            options,
        )
        self._thread.begin()

    @property
    def coordinator(self) -> str:
        """The address of this job's coordinator."""
        return self._thread.coordinator

    def wait_for(self, instances: int, timeout: float) -> None:
        """Waits, at rank 0, until all training ranks and `instances` instances are connected.

        Raises DeadlineExceeded after `timeout` seconds, which names those that are missing, and why
        each address was not connected. Raises AuthenticationFailed at once if a receiver has
        another cluster key, and likewise other lasting errors of connecting.
        """
        if not timeout > 0:
            raise InvalidArgument(f"the wait for instances is {timeout} s; use more than 0")
        seconds = min(timeout + _CALL_SECONDS, threading.TIMEOUT_MAX)
        self._thread.run(self._thread.joined(instances, timeout), seconds)

    def push(self, version: int) -> Push:
        """Begins an update once all training ranks have called this. The parameters must not be
        changed until `Push.read()` has returned.

        Raises InvalidArgument while the previous push has not ended. Raises what `tensors` raises,
        and InvalidArgument for tensors that are not the holdings; the pushes of all other ranks
        then fail with that reason.
        """
        # Checked first: `tensors` may overwrite copies that the previous push still sends.
        if self._push is not None and not self._push.done():
            raise InvalidArgument(
                f"the push of version {self._push.version} has not ended; wait for its result"
            )
        try:
            tensors = self._tensors()
        except Exception as error:
            with contextlib.suppress(KvxferError, TimeoutError):
                self._thread.run(self._thread.refuse(version, error), _CALL_SECONDS)
            raise
        self._push = self._thread.run(self._thread.push(version, tensors), _CALL_SECONDS)
        return self._push

    def withdraw(self) -> None:
        """Gives up the push that is under way, if any: its parameters are no longer read when this
        returns. The pushes of all other ranks are aborted."""
        self._thread.run(self._thread.withdraw(), _CALL_SECONDS)

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _TrainerThread(LoopThread):
    def __init__(
        self,
        rank: int,
        world_size: int,
        holdings: Holdings,
        coordinator: str | None,
        receivers: Sequence[str],
        control_path: SyncControlPath | None,
        registrar: Registrar | None,
        settings: UpdateSettings | None,
        cluster_key: str | bytes,
        options: EngineOptions,
    ) -> None:
        super().__init__()
        self._rank, self._world_size, self._holdings = rank, world_size, holdings
        self._receivers, self._settings = receivers, settings
        self._control_path = None if control_path is None else _InThreads(control_path)
        self._registrar = registrar
        self._cluster_key, self._options = cluster_key, options
        self._leader: WeightCoordinator | None = None
        self.coordinator = coordinator or ""

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            options: EngineOptions = {"name": f"trainer-{self._rank}", **self._options}
            if not self.coordinator:
                lead = await self._engine(stack, {**options, "name": f"{options['name']}-lead"})
                options.pop("port", None)
                self._leader = await stack.enter_async_context(
                    WeightCoordinator(
                        lead,
                        trainers=self._world_size,
                        receivers=self._receivers,
                        control_path=self._control_path,
                        registrar=self._registrar,
                        settings=self._settings,
                    )
                )
                self.coordinator = lead.address
            engine = await self._engine(stack, options)
            self._sender = await stack.enter_async_context(
                WeightSender(engine, self._holdings, self._rank)
            )
            await self._sender.join(self.coordinator, _JOIN_SECONDS)
            self._started.set_result(None)
            await self._closing.wait()

    async def _engine(self, stack: contextlib.AsyncExitStack, options: EngineOptions) -> Engine:
        from kvxfer.engine import Engine

        return await stack.enter_async_context(Engine(cluster_key=self._cluster_key, **options))

    async def push(self, version: int, tensors: Mapping[str, Any]) -> Push:
        pushed = self._sender.push(version, tensors)
        return Push(version, _awaited(pushed.read), _awaited(pushed.report))

    async def refuse(self, version: int, error: Exception) -> None:
        self._sender.refuse(version, error)

    async def withdraw(self) -> None:
        await self._sender.withdraw(WeightUpdateAborted("this training rank has withdrawn it"))

    async def joined(self, instances: int, timeout: float) -> None:
        if self._leader is None:
            raise InvalidArgument(
                f"training rank {self._rank} has no coordinator; ask rank 0 for the connected ranks"
            )
        await self._leader.joined(instances, timeout)


class _InThreads(ControlPath):
    """A control path whose blocking calls run in threads, one at a time. A call that its caller no
    longer awaits continues, and the next one waits for it."""

    def __init__(self, path: SyncControlPath) -> None:
        self._path = path
        self._last: asyncio.Future[None] | None = None

    async def pin(self, update_id: str, version: int) -> None:
        await self._call(self._path.pin, update_id, version)

    async def commit(self, update_id: str, version: int) -> None:
        await self._call(self._path.commit, update_id, version)

    async def unpin(self, update_id: str) -> None:
        await self._call(self._path.unpin, update_id)

    async def _call(self, call: Callable[..., None], *arguments: object) -> None:
        while self._last is not None and not self._last.done():
            await asyncio.wait([self._last])
        self._last = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
        await asyncio.shield(self._last)


def _awaited(future: asyncio.Future[T]) -> _Awaited[T]:
    """Returns a future with the same outcome, for threads without a loop."""
    awaited: _Awaited[T] = concurrent.futures.Future()

    def ended(future: asyncio.Future[T]) -> None:
        if future.cancelled():
            awaited.cancel()
        elif (error := future.exception()) is not None:
            awaited.set_exception(error)
        else:
            awaited.set_result(future.result())

    future.add_done_callback(ended)
    return awaited


def _result(awaited: _Awaited[T], timeout: float | None, what: str) -> T:
    try:
        return awaited.result(timeout)
    except concurrent.futures.CancelledError:
        raise EngineClosed("the trainer was closed before the update had ended") from None
    except TimeoutError:
        if awaited.done():  # the update's own error
            raise
        raise DeadlineExceeded(f"{what} after {timeout:g} s") from None
