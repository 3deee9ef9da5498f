"""The writes of one update out of the memory of one training rank."""

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
from kvxfer.weights.transfer.member_plan import Bursts
from kvxfer.weights.transfer.messages import Grant, Hello, Push, Sent, Target
from kvxfer.weights.transfer.runs import Stretch, source_digest

if TYPE_CHECKING:
    from kvxfer.engine import MemoryRegion, Operation, Peer

_Ints: TypeAlias = NDArray[np.int64]

_MOST_RUNS: Final = 1 << 16
"""The most runs of one operation."""
_PAGES: Final = 16
"""The fewest runs of a stretch that are sent as an operation of pages. Submitting a run in a list
takes 30 times as long."""
_OPERATIONS: Final = 16
"""The most operations that are under way to one receiver."""
_AGAIN_SECONDS: Final = 0.005


class Runs(NamedTuple):
    """Runs of several parameters or lengths, as one operation."""

    sources: Sequence[str]
    """The parameter of each run, at training."""
    source_offsets: _Ints
    target_offsets: _Ints
    lengths: _Ints


class Pages(NamedTuple):
    """Runs of one parameter and one length, as one operation."""

    source: str
    source_offsets: _Ints
    target_offsets: _Ints
    length: int


Batch: TypeAlias = Runs | Pages


def batches_of(bursts: Bursts) -> tuple[Batch, ...]:
    """Returns batches in the order in which they are submitted; called once for a plan."""
    return tuple(batch for burst in bursts for batch in _batches(burst))


def _batches(burst: tuple[Stretch, ...]) -> Iterator[Batch]:
    few: list[Stretch] = []
    for stretch in burst:
        runs = len(stretch.source_offsets)
        if runs < _PAGES:
            few.append(stretch)
            continue
        for at in range(0, runs, _MOST_RUNS):
            part = slice(at, at + _MOST_RUNS)
            yield Pages(
                stretch.source,
                stretch.source_offsets[part],
                stretch.target_offsets[part],
                stretch.length,
            )
    if few:
        yield from _lists(few)


def _lists(stretches: Sequence[Stretch]) -> Iterator[Runs]:
    sources: list[str] = []
    for stretch in stretches:
        sources += [stretch.source] * len(stretch.source_offsets)
    source = np.concatenate([each.source_offsets for each in stretches])
    target = np.concatenate([each.target_offsets for each in stretches])
    lengths = np.concatenate(
        [np.full(len(each.source_offsets), each.length, np.int64) for each in stretches]
    )
    for at in range(0, len(sources), _MOST_RUNS):
        part = slice(at, at + _MOST_RUNS)
        yield Runs(sources[part], source[part], target[part], lengths[part])


class Receiver(NamedTuple):
    """An inference rank that a training rank writes to."""

    peer: Peer
    target: Target
    hello: Hello
    """The message that tells it which rank of the plan this one is."""


class Writes(NamedTuple):
    """The bytes that a training rank writes to one inference rank in one wave."""

    bursts: Bursts
    batches: tuple[Batch, ...]


class Sending:
    """The writes of one update: to each receiver once that has granted its arena. Event loop
    only."""

    def __init__(
        self,
        links: Links,
        push: Push,
        receivers: Sequence[tuple[Receiver, Writes]],
        regions: Mapping[str, MemoryRegion],
    ) -> None:
        self._links = links
        self._push = push
        self._receivers = receivers
        self._regions = regions
        loop = asyncio.get_running_loop()
        self._grants: dict[int, asyncio.Future[Grant]] = {
            receiver.peer.id: loop.create_future() for receiver, _ in receivers
        }

    def granted(self, peer: Peer, grant: Grant) -> None:
        """Takes the permission of an inference rank to write."""
        future = self._grants.get(peer.id)
        if future is not None and not future.done():
            future.set_result(grant)

    async def run(self) -> None:
        """Writes everything to all receivers. Raises the loss of one, DeadlineExceeded, and what
        the engine raises. However it ends, memory of this rank is no longer read."""
        try:
            async with asyncio.timeout(self._push.seconds), asyncio.TaskGroup() as group:
                for receiver, writes in self._receivers:
                    group.create_task(self._to(receiver, writes))
        except TimeoutError:
            raise DeadlineExceeded(
                f"update {self._push.update_id} was not written within {self._push.seconds:g} s"
            ) from None
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None

    async def _to(self, receiver: Receiver, writes: Writes) -> None:
        peer, who = receiver.peer, receiver.target.name
        grant = self._grants[peer.id]
        with told_of_loss(peer, grant, who):
            granted = await grant
        digest: asyncio.Future[int] | None = None
        if self._push.digests:
            stretches = [each for burst in writes.bursts for each in burst]
            digest = asyncio.ensure_future(
                asyncio.to_thread(source_digest, stretches, self._regions)
            )
        try:
            immediates = await self._write(peer, writes, granted)
        except KvxferError:
            if not peer.alive:
                raise loss_of(peer, who) from None
            raise
        finally:
            if digest is not None:  # the thread reads this rank's memory
                await until_ended(digest)
        found = None if digest is None else digest.result()
        self._links.send(peer, Sent(self._push.update_id, immediates, found))

    async def _write(self, peer: Peer, writes: Writes, grant: Grant) -> int:
        """Writes all batches, and returns the number of immediates that the receiver counts."""
        under_way: deque[Operation] = deque()
        immediates = 0
        try:
            for batch in writes.batches:
                while len(under_way) >= _OPERATIONS:
                    await _oldest(under_way)
                operation = await self._submit(peer, batch, grant, under_way)
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
                return self._written(peer, batch, grant)
            except Backpressure:
                if under_way:
                    await _oldest(under_way)
                else:
                    await asyncio.sleep(_AGAIN_SECONDS)

    def _written(self, peer: Peer, batch: Batch, grant: Grant) -> Operation:
        if isinstance(batch, Pages):
            return peer.write_pages(
                self._regions[batch.source],
                grant.arena,
                page_length=batch.length,
                src_pages=batch.source_offsets,
                dst_pages=batch.target_offsets,
                src_stride=1,
                dst_stride=1,
                imm=grant.imm,
                timeout=self._push.seconds,
            )
        return peer.write_list(
            [self._regions[name] for name in batch.sources],
            [grant.arena] * len(batch.sources),
            src_offsets=batch.source_offsets,
            dst_offsets=batch.target_offsets,
            lengths=batch.lengths,
            imm=grant.imm,
            timeout=self._push.seconds,
        )


async def _oldest(under_way: deque[Operation]) -> None:
    await under_way[0]
    under_way.popleft()
