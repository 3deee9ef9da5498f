"""The ranks of an instance take its epoch from the first rank."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.errors import InvalidArgument
from verify.polling import eventually

from .workers import worker

pytestmark = pytest.mark.native


async def test_a_rank_takes_each_epoch_of_the_first_one(fabric: str) -> None:
    async with (
        worker("first", fabric, instance_id="p", epoch=7) as first,
        worker("second", fabric, instance_id="p", epoch=0) as second,
    ):
        peer = await second.endpoint.follow(first.engine.address)
        assert (peer.alive, second.endpoint.epoch) == (True, 7)
        first.endpoint.set_epoch(8)
        await eventually(lambda: second.endpoint.epoch == 8)


async def test_a_rank_waits_until_the_first_one_is_registered(fabric: str) -> None:
    async with (
        worker("first", fabric, instance_id="p", epoch=0) as first,
        worker("second", fabric, instance_id="p", epoch=0) as second,
    ):
        following = asyncio.create_task(second.endpoint.follow(first.engine.address))
        await eventually(lambda: first.engine.peers)
        assert not following.done()
        first.endpoint.set_epoch(3)
        await following
        assert second.endpoint.epoch == 3


async def test_an_epoch_of_another_instance_is_not_taken(fabric: str) -> None:
    async with (
        worker("first", fabric, instance_id="d", epoch=7) as first,
        worker("second", fabric, instance_id="p", epoch=0) as second,
    ):
        with pytest.raises(InvalidArgument, match="is of instance 'd', not of 'p'"):
            await second.endpoint.follow(first.engine.address)
        assert second.endpoint.epoch == 0


async def test_an_engine_that_connects_with_the_id_of_the_instance_does_not_set_its_epoch(
    fabric: str,
) -> None:
    async with (
        worker("second", fabric, instance_id="p", epoch=2) as second,
        worker("stranger", fabric, instance_id="p", epoch=9) as stranger,
    ):
        await stranger.endpoint.follow(second.engine.address)
        assert (second.endpoint.epoch, stranger.endpoint.epoch) == (2, 9)
