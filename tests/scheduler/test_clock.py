from __future__ import annotations

import time

import pytest

from kvxfer.errors import UnknownInstance
from kvxfer.instances import InstanceState
from kvxfer.scheduler.choice import EMBEDDED, make_registry
from kvxfer.scheduler.registry import LeasePolicy
from tests.control_plane import worker


@pytest.fixture
def pass_time(monkeypatch):
    """Lets seconds pass on this machine."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    return advance


async def test_time_in_which_the_control_plane_stood_still_ends_no_lease(pass_time):
    registry = make_registry(EMBEDDED, LeasePolicy(6.0))
    lease = await registry.register(worker("p"), state=InstanceState.READY)
    for _ in range(3):
        pass_time(60)  # stopped, and whoever comes first is not the worker
        assert len(await registry.instances()) == 1
        await registry.heartbeat("p", lease.epoch)


async def test_a_lease_that_nobody_renews_ends(pass_time):
    registry = make_registry(EMBEDDED, LeasePolicy(6.0))
    await registry.register(worker("p"), state=InstanceState.READY)
    for _ in range(12):
        assert await registry.instance("p")
        pass_time(0.5)
        await registry.sweep()
    with pytest.raises(UnknownInstance):
        await registry.instance("p")
