"""Looks are shared, and paid for by a pause."""

from __future__ import annotations

from kvxfer.api import overview_feed
from kvxfer.api.overview_feed import OverviewFeed
from kvxfer.clock import SystemClock
from kvxfer.instances import Role
from kvxfer.overview import OverviewQuery
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.scaling.history import ScalingHistory
from tests.control_plane import worker
from verify.polling import eventually


async def test_one_look_is_for_all_who_ask_the_same_until_its_pause_is_over(monkeypatch):
    registry = EmbeddedRegistry()
    feed = OverviewFeed(registry, ScalingHistory(), SystemClock())
    monkeypatch.setattr(overview_feed, "_PAUSE", 1e9)
    monkeypatch.setattr(overview_feed, "_LONGEST_PAUSE", 0.3)
    everything, prefill = OverviewQuery(), OverviewQuery(role=Role.PREFILL)
    first = await feed.look(everything)
    await registry.register(worker("p"))
    assert await feed.look(everything) is first
    other = await feed.look(prefill)  # waits for the pause, and then sees what is new
    assert other.matching == 1

    async def seen():
        return (await feed.look(everything)).matching == 1

    await eventually(seen)


async def test_queries_that_nobody_repeats_are_forgotten(monkeypatch):
    feed = OverviewFeed(EmbeddedRegistry(), ScalingHistory(), SystemClock())
    monkeypatch.setattr(overview_feed, "_LONGEST_PAUSE", 0.0)
    for offset in range(200):
        await feed.look(OverviewQuery(offset=offset))
    assert len(feed._looks) == 64
