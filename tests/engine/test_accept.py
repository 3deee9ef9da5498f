"""Engines accept the peers that connect to them."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer import Engine, PolledEngine
from kvxfer.errors import DeadlineExceeded, EngineClosed, InvalidArgument
from tests.engine.conftest import KEY, Pair, new_engine
from verify.polling import PATIENCE, eventually

pytestmark = pytest.mark.native


async def test_peers_that_connect_are_accepted_in_their_order(fabric: str) -> None:
    async with (
        new_engine(fabric, "hub") as hub,
        new_engine(fabric, "first") as first,
        new_engine(fabric, "second") as second,
    ):
        accepting = asyncio.create_task(hub.accept(PATIENCE))
        await first.connect(hub.address, PATIENCE)
        assert (await accepting).name == "first"
        await second.connect(hub.address, PATIENCE)
        # It has connected before the call of accept().
        await eventually(lambda: len(hub.peers) == 2)
        assert (await hub.accept(PATIENCE)).name == "second"
        with pytest.raises(DeadlineExceeded, match="no peer has connected within 0 s"):
            await hub.accept(0)


async def test_a_peer_that_this_engine_connected_to_is_not_accepted(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded):
        await pair.writer.accept(0)
    assert await pair.reader.accept(PATIENCE) is pair.to_writer


async def test_a_peer_that_was_lost_is_not_accepted(pair: Pair) -> None:
    await pair.writer.close()
    await eventually(lambda: not pair.to_writer.alive)
    with pytest.raises(DeadlineExceeded):
        await pair.reader.accept(0)


async def test_each_of_several_tasks_accepts_another_peer(fabric: str) -> None:
    async with new_engine(fabric, "hub") as hub:
        given_up, *waiting = (asyncio.create_task(hub.accept(PATIENCE)) for _ in range(3))
        await asyncio.sleep(0)
        given_up.cancel()
        async with new_engine(fabric, "first") as first, new_engine(fabric, "second") as second:
            for each in (first, second):
                await each.connect(hub.address, PATIENCE)
            accepted = await asyncio.gather(*waiting)
        assert [peer.name for peer in accepted] == ["first", "second"]


async def test_closing_ends_the_wait() -> None:
    async with Engine(cluster_key=KEY) as engine:
        waiting = asyncio.create_task(engine.accept())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineClosed):
            await waiting
        with pytest.raises(EngineClosed):
            await engine.accept()


async def test_an_engine_accepts_once_it_is_entered() -> None:
    engine = Engine(cluster_key=KEY)
    with pytest.raises(InvalidArgument, match="enter the engine first"):
        await engine.accept()
    await engine.close()


async def test_a_polled_engine_accepts() -> None:
    with PolledEngine(cluster_key=KEY, fabrics=["tcp"], peer_timeout=PATIENCE) as polled:
        async with new_engine("tcp", "other") as other:
            connecting = asyncio.create_task(other.connect(polled.address, PATIENCE))
            await asyncio.sleep(0)
            peer = polled.accept(PATIENCE)
            assert peer.name == "other"
            while not connecting.done():
                polled.poll()
                await asyncio.sleep(0)
            await connecting
