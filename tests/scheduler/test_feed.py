from __future__ import annotations

import asyncio

import pytest

from kvxfer.instances import Change, ChangeCause, Instance, InstanceState
from kvxfer.scheduler.feed import ChangeFeed
from tests.virtual_time import passes
from verify.processes.control_plane import worker


def feed_with(count: int, *, capacity: int = 4) -> ChangeFeed:
    feed = ChangeFeed(last_id=100, capacity=capacity)
    spec = worker("p")
    instance = Instance(
        **{name: getattr(spec, name) for name in spec.__struct_fields__},
        epoch=1,
        state=InstanceState.READY,
        registered_at=0.0,
        heartbeat_at=0.0,
    )
    for _ in range(count):
        feed.append(Change(id=feed.last_id + 1, cause=ChangeCause.STATE_CHANGED, instance=instance))
    return feed


@pytest.mark.parametrize(
    ("appended", "covered"),
    [(0, [100]), (1, [100, 101]), (4, [100, 101, 102, 103, 104]), (6, [102, 103, 104, 105, 106])],
)
def test_positions_are_covered_while_every_later_change_is_kept(appended, covered):
    feed = feed_with(appended)
    assert [position for position in range(98, 110) if feed.covers(position)] == covered


def test_after_gives_the_next_changes_up_to_the_limit():
    feed = feed_with(6)
    assert [change.id for change in feed.after(103, limit=2)] == [104, 105]
    assert [change.id for change in feed.after(102, limit=100)] == [103, 104, 105, 106]
    assert feed.after(106, limit=100) == []


async def test_wait_returns_at_once_if_there_is_a_later_change():
    feed = feed_with(2)
    await feed.wait(101)


async def test_wait_returns_when_the_feed_is_closed():
    feed = feed_with(0)
    waiting = asyncio.ensure_future(feed.wait(100))
    await passes(1)
    assert not waiting.done()
    feed.close()
    await waiting
