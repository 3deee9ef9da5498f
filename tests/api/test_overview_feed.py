"""Callers with equal queries share an overview, and a pause follows each."""

from __future__ import annotations

from kvxfer.api import overview_feed
from kvxfer.api.overview_feed import OverviewFeed
from kvxfer.instances import Role
from kvxfer.overview import OverviewQuery
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.scaling.history import ScalingHistory
from tests.virtual_time import passes
from verify.processes.control_plane import worker


async def test_equal_queries_share_an_overview_until_its_pause_ends(clock, monkeypatch):
    registry = EmbeddedRegistry(clock=clock)
    feed = OverviewFeed(registry, ScalingHistory(), clock)
    monkeypatch.setattr(overview_feed, "_PAUSE", 1e9)  # each pause is then the longest, 2 s
    everything, prefill = OverviewQuery(), OverviewQuery(role=Role.PREFILL)
    began = clock.monotonic()
    first = await feed.look(everything)
    await registry.register(worker("p"))
    await passes(1.5)
    assert await feed.look(everything) is first
    assert clock.monotonic() == began + 1.5
    other = await feed.look(prefill)  # waits for the pause, then sees the new instance
    assert other.matching == 1
    assert clock.monotonic() == began + 2
    assert (await feed.look(everything)).matching == 1
    assert clock.monotonic() == began + 4


async def test_queries_that_nobody_repeats_are_forgotten(clock, monkeypatch):
    feed = OverviewFeed(EmbeddedRegistry(clock=clock), ScalingHistory(), clock)
    monkeypatch.setattr(overview_feed, "_LONGEST_PAUSE", 0.0)
    for offset in range(200):
        await feed.look(OverviewQuery(offset=offset))
    assert len(feed._looks) == 64
