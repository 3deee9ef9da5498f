"""The weight receiver of one rank, for a model that computes in threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from kvxfer.engine import Engine, EngineOptions
from kvxfer.errors import DeadlineExceeded, InvalidArgument
from kvxfer.loop_thread import LoopThread
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.shards import Shard, holdings_of
from kvxfer.weights.transfer.receiver import WeightReceiver
from kvxfer.weights.transfer.staged import Staged

T = TypeVar("T")

Commit: TypeAlias = Callable[[Staged], Awaitable[float | None]]
"""Applies an update to the whole instance, and returns its pause in seconds."""

_CALL_SECONDS: Final = 60.0


def staged_boxes(receiver: WeightReceiver) -> dict[str, Tensor]:
    """Returns views of the boxes in the arena, which is host memory."""
    memory = torch.frombuffer(receiver.memory, dtype=torch.uint8)
    return {
        name: memory[place.offset : place.offset + place.nbytes]
        .view(getattr(torch, place.holding.dtype))
        .view(place.holding.shape)
        for name, place in receiver.arena.places.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """A factory that makes the receiver of each rank of an instance, in the rank's process."""

    config: LlamaConfig
    instance_id: str
    cluster_key: bytes | str = field(repr=False)
    coordinator: str | None = None
    """The address that each rank dials; without it the coordinator dials the ranks."""
    dtype: str = "float32"
    """The type that training sends; it is converted to the type that the model computes in."""
    options: EngineOptions = field(default_factory=EngineOptions)

    def __call__(self, shard: Shard) -> ReceiverThread:
        return ReceiverThread(self, shard)


class ReceiverThread(LoopThread):
    """An engine and a `WeightReceiver` on a loop in a thread: a `Staging`.

    Rank 0 commits when the coordinator sends a message, by the function set with commit_by().
    """

    def __init__(self, made: Receivers, shard: Shard) -> None:
        """Returns once the receiver can be dialed. Raises what the engine raises."""
        super().__init__()
        self._made, self._shard = made, shard
        self._commit: concurrent.futures.Future[Commit] = concurrent.futures.Future()
        self._pinned: Staged | None = None
        self._receiver: WeightReceiver
        self._address = ""
        self.begin()

    def commit_by(self, commit: Commit, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the function by which rank 0 applies the updates that the coordinator commits, and
        the loop to run it on."""

        async def there(staged: Staged) -> float | None:
            work = asyncio.run_coroutine_threadsafe(_awaited(commit, staged), loop)
            return await asyncio.wrap_future(work)

        self._commit.set_result(there)

    @property
    def address(self) -> str:
        return self._address

    @property
    def version(self) -> int:
        """The version that the coordinator believes to be served."""
        return self._receiver.version

    def pin(self, update_id: str) -> Staged:
        self._pinned = self._call(lambda: self._receiver.pin(update_id))
        return self._pinned

    def unpin(self, update_id: str) -> None:
        self._pinned = None
        self._call(lambda: self._receiver.unpin(update_id))

    def boxes(self) -> Mapping[str, Tensor]:
        return staged_boxes(self._receiver)

    def applied(self, staged: Staged, pause_seconds: float | None) -> None:
        self._pinned = None
        # Rank 0's receiver reports it itself, when its commit() returns.
        if self._shard.rank:
            self._call(lambda: self._receiver.applied(staged, pause_seconds))

    def broken(self, error: BaseException) -> None:
        pinned, self._pinned = self._pinned, None
        if self._shard.rank and pinned is not None:
            self._call(lambda: self._receiver.broken(pinned, error))

    def _call(self, function: Callable[[], T]) -> T:
        async def there() -> T:
            return function()

        return self.run(there(), _CALL_SECONDS)

    async def _committed(self, staged: Staged) -> float | None:
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                commit = await asyncio.wrap_future(self._commit)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._made.instance_id!r} has not begun to serve in {_CALL_SECONDS:g} s"
            ) from None
        return await commit(staged)

    async def _serve(self) -> None:
        made, (rank, ranks) = self._made, self._shard
        name = made.instance_id if ranks == 1 else f"{made.instance_id}/{rank}"
        options: EngineOptions = {"name": f"{name}-weights", **made.options}
        if rank and options.get("port"):
            raise InvalidArgument("port is for one engine, and each rank has one; leave it out")
        async with (
            Engine(cluster_key=made.cluster_key, **options) as engine,
            WeightReceiver(
                engine,
                holdings_of(made.config, self._shard, made.dtype),
                instance_id=made.instance_id,
                rank=rank,
                ranks=ranks,
                commit=None if rank else self._committed,
            ) as self._receiver,
        ):
            self._address = engine.address
            if made.coordinator is not None:
                self._receiver.dial(made.coordinator)
            self._started.set_result(None)
            await self._closing.wait()


async def _awaited(commit: Commit, staged: Staged) -> float | None:
    return await commit(staged)
