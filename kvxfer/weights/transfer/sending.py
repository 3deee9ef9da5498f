"""One update on its way out of the memory of one training rank."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import Backpressure, DeadlineExceeded, KvxferError
from kvxfer.weights.transfer.endings import first_error, loss_of, told_of_loss, until_ended
from kvxfer.weights.transfer.links import Links
from kvxfer.weights.transfer.member_plan import Waves
from kvxfer.weights.transfer.messages import Grant, Hello, Push, Sent
from kvxfer.weights.transfer.runs import Stretch, source_digest

if TYPE_CHECKING:
    from kvxfer.engine import MemoryRegion, Operation, Peer

_Ints: TypeAlias = NDArray[np.int64]

_MOST_RUNS: Final = 1 << 16
"""Of one operation."""
_OPERATIONS: Final = 4
"""Under way to one receiver: waves, or parts of them."""
_AGAIN_SECONDS: Final = 0.005


class Batch(NamedTuple):
    """Runs that are one operation."""

    sources: Sequence[str]
    """The parameter of each run, at training."""
    source_offsets: _Ints
    target_offsets: _Ints
    lengths: _Ints


def batches_of(waves: Waves) -> tuple[Batch, ...]:
    """In the order in which they are submitted; made once for a plan."""
    return tuple(batch for wave in waves for batch in _batches(wave))


def _batches(wave: tuple[Stretch, ...]) -> Iterator[Batch]:
    sources: list[str] = []
    for stretch in wave:
        sources += [stretch.source] * len(stretch.source_offsets)
    source = np.concatenate([each.source_offsets for each in wave])
    target = np.concatenate([each.target_offsets for each in wave])
    lengths = np.concatenate(
        [np.full(len(each.source_offsets), each.length, np.int64) for each in wave]
    )
    for at in range(0, len(sources), _MOST_RUNS):
        part = slice(at, at + _MOST_RUNS)
        yield Batch(sources[part], source[part], target[part], lengths[part])


class Receiver(NamedTuple):
    """What a training rank writes to one inference rank."""

    peer: Peer
    address: str
    hello: Hello
    """That tells it which rank of the plan this one is."""
    waves: Waves
    batches: tuple[Batch, ...]


class Sending:
    """Writes to each receiver once it has granted its arena. Loop only."""

    def __init__(
        self,
        links: Links,
        push: Push,
        receivers: Mapping[int, Receiver],
        regions: Mapping[str, MemoryRegion],
    ) -> None:
        self._links = links
        self._push = push
        self._receivers = receivers
        self._regions = regions
        loop = asyncio.get_running_loop()
        self._grants: dict[int, asyncio.Future[Grant]] = {
            each.peer.id: loop.create_future() for each in receivers.values()
        }

    def granted(self, peer: Peer, grant: Grant) -> None:
        """An inference rank lets this one write."""
        future = self._grants.get(peer.id)
        if future is not None and not future.done():
            future.set_result(grant)

    async def run(self) -> None:
        """Returns when all receivers have everything. Raises the loss of one, DeadlineExceeded, and
        what the engine raises. However it ends, memory of this rank is not read any more."""
        try:
            async with asyncio.timeout(self._push.seconds), asyncio.TaskGroup() as group:
                for number, receiver in self._receivers.items():
                    group.create_task(self._to(number, receiver))
        except TimeoutError:
            raise DeadlineExceeded(
                f"update {self._push.update_id} was not written within {self._push.seconds:g} s"
            ) from None
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None

    async def _to(self, number: int, receiver: Receiver) -> None:
        peer, grant = receiver.peer, self._grants[receiver.peer.id]
        who = f"inference rank {number} ({peer.name!r})"
        with told_of_loss(peer, grant, who):
            granted = await grant
        digest: asyncio.Future[int] | None = None
        if self._push.digests:
            stretches = [each for wave in receiver.waves for each in wave]
            digest = asyncio.ensure_future(
                asyncio.to_thread(source_digest, stretches, self._regions)
            )
        try:
            immediates = await self._write(receiver, granted)
        except KvxferError:
            if not peer.alive:
                raise loss_of(peer, who) from None
            raise
        finally:
            if digest is not None:  # it reads this rank's memory
                await until_ended(digest)
        found = None if digest is None else digest.result()
        self._links.send(peer, Sent(self._push.update_id, immediates, found))

    async def _write(self, receiver: Receiver, grant: Grant) -> int:
        """Immediates that the receiver counts in all."""
        under_way: deque[Operation] = deque()
        immediates = 0
        try:
            for batch in receiver.batches:
                while len(under_way) >= _OPERATIONS:
                    await _oldest(under_way)
                operation = await self._submit(receiver.peer, batch, grant, under_way)
                under_way.append(operation)
                immediates += operation.immediates
            while under_way:
                await _oldest(under_way)
        except BaseException:
            for operation in under_way:
                operation.cancel()
            await until_ended(*under_way)
            raise
        return immediates

    async def _submit(
        self, peer: Peer, batch: Batch, grant: Grant, under_way: deque[Operation]
    ) -> Operation:
        while True:
            try:
                return peer.write_list(
                    [self._regions[name] for name in batch.sources],
                    [grant.arena] * len(batch.sources),
                    src_offsets=batch.source_offsets,
                    dst_offsets=batch.target_offsets,
                    lengths=batch.lengths,
                    imm=grant.imm,
                    timeout=self._push.seconds,
                )
            except Backpressure:
                if under_way:
                    await _oldest(under_way)
                else:
                    await asyncio.sleep(_AGAIN_SECONDS)


async def _oldest(under_way: deque[Operation]) -> None:
    await under_way[0]
    under_way.popleft()
