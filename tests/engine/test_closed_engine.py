"""Every use of a closed engine fails with an error that says that it is closed."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvxfer import Engine, PeerGroup, PolledEngine, ReceivePool, RemotePool
from kvxfer.errors import EngineClosed, EngineError
from tests.engine.conftest import KEY, Pair, new_engine
from verify.polling import PATIENCE

pytestmark = pytest.mark.native


async def closed(calls: dict[str, Callable[[], Any]]) -> None:
    """Asserts that each of the calls raises EngineClosed."""
    other = []
    for name, call in calls.items():
        try:
            answer = call()
            if inspect.isawaitable(answer):
                await asyncio.wait_for(answer, PATIENCE)
        except EngineClosed:
            continue
        except Exception as error:
            other.append(f"{name}: {error!r}")
        else:
            other.append(f"{name} does not raise")
    assert not other, "\n".join(other)


async def test_every_use_of_a_closed_engine_raises_engine_closed(pair: Pair) -> None:
    engine, peer = pair.writer, pair.to_reader
    memory, counter, watcher = engine.alloc(64), engine.counter(peer), engine.watcher()
    group = PeerGroup(engine, [peer])
    pool = ReceivePool(engine, 2, 64)
    lent = ReceivePool(pair.reader, 2, 64)
    remote = RemotePool(peer, lent.offer(pair.to_writer, 1))
    offer = lent.offer(pair.to_writer, 1)
    to = pair.reader.alloc(64).descriptor
    one = {"src_offsets": [0], "dst_offsets": [0], "lengths": [8]}
    held = peer.write(memory, to, length=8, after=watcher.at(1))
    waiting = asyncio.create_task(counter.wait(1))
    accepting = asyncio.create_task(engine.accept())
    receiving = asyncio.create_task(peer.receive())
    await asyncio.sleep(0)
    await engine.close()
    await closed(
        {
            "async with": engine.__aenter__,
            "accept": engine.accept,
            "accept, before": lambda: accepting,
            "alloc": lambda: engine.alloc(64),
            "connect": lambda: engine.connect(pair.reader.address),
            "counter": engine.counter,
            "counter of a peer": lambda: engine.counter(peer),
            "register": lambda: engine.register(bytearray(64)),
            "watcher of a GPU": lambda: engine.watcher(gpu=0),
            "grant": lambda: counter.grant([(memory, 0, 8)]),
            "mirror": counter.mirror,
            "on_arrival": lambda: counter.on_arrival(print),
            "wait": lambda: counter.wait(1),
            "wait, before": lambda: waiting,
            "wait_at_least": lambda: counter.wait_at_least(1),
            "barrier": lambda: group.barrier(1),
            "scatter": lambda: group.scatter(memory, [to], **one),
            "fence": peer.fence,
            "receive": peer.receive,
            "receive, before": lambda: receiving,
            "send": lambda: peer.send(b"late"),
            "write": lambda: peer.write(memory, to, length=8),
            "write, before": lambda: held,
            "write_imm": lambda: peer.write_imm(1),
            "write_list": lambda: peer.write_list([memory], [to], **one),
            "write_pages": lambda: peer.write_pages(
                memory, to, page_length=8, src_pages=[0], dst_pages=[0]
            ),
            "ReceivePool": lambda: ReceivePool(engine, 2, 64),
            "offer": lambda: pool.offer(peer, 1),
            "next": pool.__anext__,
            "RemotePool": lambda: RemotePool(peer, offer),
            "RemotePool.available": remote.available,
            "RemotePool.send": lambda: remote.send(memory, 8),
        }
    )
    assert isinstance(peer.error, EngineClosed)
    # Calls that release something still work.
    counter.release()
    memory.close()
    remote.close()
    pool.close()
    peer.close()
    await engine.close()


async def test_closing_reports_lost_peers_to_the_handler() -> None:
    class Handler:
        def peer_up(self, _peer: object) -> None: ...
        def message(self, _peer: object, _data: bytes) -> None: ...
        def peer_lost(self, _peer: object, error: EngineError) -> None:
            heard.append(error)

    heard: list[EngineError] = []
    async with new_engine("tcp", "a") as a, new_engine("tcp", "b") as b:
        a.handler = Handler()
        await a.connect(b.address, PATIENCE)
        await a.close()
    assert [type(each) for each in heard] == [EngineClosed]


async def test_a_closed_polled_engine_says_so() -> None:
    with PolledEngine(cluster_key=KEY) as engine:
        counter = engine.counter()
        address = engine.address
    await closed(
        {
            "accept": lambda: engine.accept(PATIENCE),
            "alloc": lambda: engine.alloc(64),
            "connect": lambda: engine.connect(address),
            "counter": engine.counter,
            "poll_until": lambda: engine.poll_until(lambda: False, PATIENCE),
            "poll_counter": lambda: engine.poll_counter(counter, 1, PATIENCE),
        }
    )


async def test_an_engine_is_entered_once() -> None:
    async with Engine(cluster_key=KEY) as engine:
        with pytest.raises(ValueError, match="enter each engine once"):
            await engine.__aenter__()


async def test_closing_does_not_wait_for_other_calls_in_a_thread() -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    answer = threading.Event()
    unanswered = loop.run_in_executor(None, answer.wait)
    async with Engine(cluster_key=KEY, fabrics=["tcp"]) as engine:
        try:
            await asyncio.wait_for(engine.close(), PATIENCE)
            assert not unanswered.done()
        finally:
            answer.set()
    await unanswered
