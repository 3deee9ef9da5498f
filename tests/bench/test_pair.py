"""The checks after a real transfer, with the receiver in this process so that tests can damage
it."""

import asyncio
import mmap
import socket
from collections.abc import AsyncIterator

import pytest

from kvxfer import _probes
from kvxfer.bench import messages as m
from kvxfer.bench.cases import CASES
from kvxfer.bench.channel import SocketChannel
from kvxfer.bench.destination import Destination
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.pair import Pair, open_pair
from kvxfer.bench.probe_end import ProbeEnd
from kvxfer.bench.receiver import serve
from kvxfer.errors import BenchError, WrongBytes

pytestmark = pytest.mark.native

POOL_BYTES = 4 << 20
DRAW = PageDraw(9, 4096, 1 << 20, POOL_BYTES, requests=2)


@pytest.fixture
async def spoilable() -> AsyncIterator[tuple[Pair, Destination]]:
    """A connected pair, and the destination that its receiver checks."""
    ours, theirs = socket.socketpair()
    channel, receiver = await SocketChannel.over(ours), await SocketChannel.over(theirs)
    destination = Destination(POOL_BYTES)
    mailbox = mmap.mmap(-1, _probes.MAILBOX_BYTES)
    served = asyncio.create_task(serve(receiver, destination, ProbeEnd(destination.pool, mailbox)))
    async with open_pair(channel, CASES["tcp"], POOL_BYTES) as pair:
        yield pair, destination
    channel.close()
    await served


async def test_a_faultless_transfer_passes_and_leaves_the_pool_blank(
    spoilable: tuple[Pair, Destination],
) -> None:
    pair, destination = spoilable
    for _ in range(2):
        durations = await pair.transfer(DRAW)
        assert [duration > 0 for duration in durations] == [True] * DRAW.requests
        assert not destination.pool.any()


async def test_one_wrong_bit_fails_the_transfer(spoilable: tuple[Pair, Destination]) -> None:
    pair, destination = spoilable
    transfer = await pair.prepare(DRAW)
    await transfer.run()
    page = int(DRAW.draw()[1].dst[-1])
    destination.pool[page * 4096 + 4095] ^= 0x80
    with pytest.raises(WrongBytes, match=f"byte 4095 of destination page {page} "):
        await transfer.check()


async def test_one_byte_outside_the_pages_fails_the_transfer(
    spoilable: tuple[Pair, Destination],
) -> None:
    pair, destination = spoilable
    transfer = await pair.prepare(DRAW)
    await transfer.run()
    written = {int(page) for request in DRAW.draw() for page in request.dst}
    spare = next(page for page in range(POOL_BYTES // 4096) if page not in written)
    destination.pool[spare * 4096] = 1
    with pytest.raises(WrongBytes, match="no page of the request is there"):
        await transfer.check()


async def test_a_count_that_is_too_high_fails_the_transfer(
    spoilable: tuple[Pair, Destination],
) -> None:
    pair, _ = spoilable
    transfer = await pair.prepare(DRAW)
    await transfer.run()
    await transfer.run()
    with pytest.raises(BenchError):
        await pair.channel.call(m.CheckWrites(DRAW, 1), m.Done)
