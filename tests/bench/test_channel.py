import asyncio
import socket

import pytest

from kvxfer.bench import messages as m
from kvxfer.bench.channel import SocketChannel
from kvxfer.bench.pages import PageDraw
from kvxfer.errors import BenchError, WrongBytes

pytestmark = pytest.mark.native


@pytest.fixture
async def ends() -> tuple[SocketChannel, SocketChannel]:
    ours, theirs = socket.socketpair()
    return await SocketChannel.over(ours), await SocketChannel.over(theirs)


async def answer_once(end: SocketChannel, answer: m.Answer) -> m.Request | None:
    request = await end.next_request()
    await end.answer(answer)
    return request


async def test_a_request_and_its_answer_arrive_as_they_were_sent(
    ends: tuple[SocketChannel, SocketChannel],
) -> None:
    sender, receiver = ends
    request = m.CheckWrites(PageDraw(1, 4096, 8192, 1 << 20), total=2)
    answer, received = await asyncio.gather(
        sender.call(request, m.Durations), answer_once(receiver, m.Durations([5, 6]))
    )
    assert (answer, received) == (m.Durations([5, 6]), request)


async def test_a_failure_is_raised_as_the_error_of_its_code(
    ends: tuple[SocketChannel, SocketChannel],
) -> None:
    sender, receiver = ends
    served = asyncio.create_task(answer_once(receiver, m.Failed("wrong-bytes", "byte 3")))
    with pytest.raises(WrongBytes, match="byte 3"):
        await sender.call(m.TcpListen(), m.TcpPort)
    await served


async def test_a_receiver_that_ends_is_reported_with_what_it_was_doing(
    ends: tuple[SocketChannel, SocketChannel],
) -> None:
    sender, receiver = ends
    receiver.close()
    with pytest.raises(BenchError, match="ended during TcpListen"):
        await sender.call(m.TcpListen(), m.TcpPort)


async def test_requests_end_with_the_sender(
    ends: tuple[SocketChannel, SocketChannel],
) -> None:
    sender, receiver = ends
    sender.close()
    assert await receiver.next_request() is None
