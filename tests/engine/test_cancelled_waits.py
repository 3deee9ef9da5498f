"""A wait that is cancelled cancels its writes, and ends when their source may be changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from kvxfer import OperationGroup, PeerGroup
from kvxfer.errors import Cancelled, EngineClosed
from tests.engine.conftest import Pair, bytes_of
from verify.polling import PATIENCE, eventually

pytestmark = pytest.mark.native

SIZE: Final = 64 << 20
OLD, NEW = 1, 2


class Writes:
    """Writes that are under way and do not end by themselves."""

    def __init__(self, pair: Pair, kind: str) -> None:
        self.pair = pair
        self.source, self.target = pair.writer.alloc(SIZE), pair.reader.alloc(SIZE)
        bytes_of(self.source)[:] = OLD
        self.watcher = pair.writer.watcher()
        self.began = pair.writer.stats()["writes_posted"]
        peer, to = pair.to_reader, self.target.descriptor
        if kind == "operation":
            # There are so many that some are still under way when the wait is cancelled.
            many = 16
            self.awaited: Any = peer.write_list(
                [self.source] * many,
                [to] * many,
                src_offsets=[0] * many,
                dst_offsets=[0] * many,
                lengths=[SIZE] * many,
            )
            return
        held = peer.write(self.source, to, length=SIZE, after=self.watcher.at(1))
        if kind == "group":
            first = peer.write(self.source, to, length=SIZE)
            self.awaited = OperationGroup([first, held])
        else:
            first = PeerGroup(pair.writer, [peer]).scatter(
                self.source, [to], src_offsets=[0], dst_offsets=[0], lengths=[SIZE]
            )
            self.awaited = OperationGroup([first, held])

    async def posted(self) -> None:
        await asyncio.sleep(0)  # the wait for them has begun
        await eventually(
            lambda: self.pair.writer.stats()["writes_posted"] > self.began, pause=0.0001
        )

    async def change_the_source(self) -> None:
        """Changes the source after the wait has ended; nothing of the change may reach the peer."""
        bytes_of(self.source)[:] = NEW
        self.watcher.add()
        # After this no write of the peer lands.
        self.pair.to_writer.fence()
        assert not (bytes_of(self.target) == NEW).any()
        assert self.awaited.done()


async def by_its_task(writes: Writes) -> None:
    async def wait() -> None:
        await writes.awaited

    task = asyncio.create_task(wait())
    await writes.posted()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_wait_for(writes: Writes) -> None:
    async def wait() -> None:
        await asyncio.wait_for(writes.awaited, PATIENCE)

    task = asyncio.create_task(wait())
    await writes.posted()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_a_timeout(writes: Writes) -> None:
    async def wait() -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await writes.awaited

    limits: list[asyncio.Timeout] = []
    task = asyncio.create_task(wait())
    await writes.posted()
    limits[0].reschedule(asyncio.get_running_loop().time())
    with pytest.raises(TimeoutError):
        await task


async def twice(writes: Writes) -> None:
    async def wait() -> None:
        await writes.awaited

    task = asyncio.create_task(wait())
    await writes.posted()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def with_its_siblings(writes: Writes) -> None:
    async def wait() -> None:
        await writes.awaited

    async def fail() -> None:
        await writes.posted()
        raise LookupError

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait())
            tasks.create_task(fail())
    assert [type(each) for each in raised.value.exceptions] == [LookupError]


@pytest.mark.parametrize("kind", ["operation", "group", "scattered"])
@pytest.mark.parametrize(
    "cancel", [by_its_task, by_wait_for, by_a_timeout, twice, with_its_siblings]
)
async def test_the_source_is_free_when_a_cancelled_wait_has_ended(
    pair: Pair, cancel: Callable[[Writes], Awaitable[None]], kind: str
) -> None:
    writes = Writes(pair, kind)
    await cancel(writes)
    await writes.change_the_source()


async def test_other_waits_for_the_operation_fail_as_it_was_cancelled(pair: Pair) -> None:
    async def wait() -> None:
        await write

    write = pair.to_reader.write_imm(1, after=pair.writer.watcher().at(1))
    first, other = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(Cancelled):
        await other
    with pytest.raises(Cancelled):
        await write


async def test_a_shielded_wait_leaves_the_operation_as_it_is(pair: Pair) -> None:
    counter = pair.reader.counter()
    watcher = pair.writer.watcher()
    write = pair.to_reader.write_imm(counter.imm, after=watcher.at(1))

    async def wait() -> None:
        await asyncio.shield(write)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not write.done()
    watcher.add()
    await write
    await counter.wait(1, PATIENCE)


async def test_a_cancelled_task_does_not_affect_an_operation_that_has_ended(pair: Pair) -> None:
    counter = pair.reader.counter()
    write = pair.to_reader.write_imm(counter.imm)
    await write

    async def wait() -> None:
        await write
        await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await write
    await counter.wait(1, PATIENCE)


async def test_a_cancelled_wait_ends_with_its_engine(pair: Pair) -> None:
    async def wait() -> None:
        await write

    write = pair.to_reader.write_imm(1, after=pair.writer.watcher().at(1))
    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    closing = asyncio.create_task(pair.writer.close())
    task.cancel()
    await closing
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises((Cancelled, EngineClosed)):
        await write
