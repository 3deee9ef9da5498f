from __future__ import annotations

import pytest

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import InstanceState
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.control_plane import FakeClock, worker


async def test_epochs_and_change_ids_go_on_ascending_when_the_process_restarts():
    clock = FakeClock()
    before = EmbeddedRegistry(clock=clock)
    epochs = [(await before.register(worker(f"p-{i}"))).epoch for i in range(1000)]
    clock.advance(0.5)
    after = EmbeddedRegistry(clock=clock)
    snapshot = await anext(after.watch())
    assert snapshot.id > max(epochs)
    assert (await after.register(worker("p-0"))).epoch > max(epochs)


async def test_watcher_of_the_process_before_a_restart_gets_a_snapshot():
    clock = FakeClock()
    before = EmbeddedRegistry(clock=clock)
    seen = (await before.register(worker("p"))).epoch
    clock.advance(0.5)
    after = EmbeddedRegistry(clock=clock)
    await after.register(worker("q"))
    snapshot = await anext(after.watch(seen))
    assert [i.instance_id for i in snapshot.instances] == ["q"]


async def test_wall_clock_that_jumps_ends_no_lease():
    clock = FakeClock()
    registry = EmbeddedRegistry(clock=clock)
    await registry.register(worker("p"), state=InstanceState.READY)
    clock._unix += 3600
    assert len(await registry.instances()) == 1


@pytest.mark.parametrize("call", ["ping", "instances", "statistics", "sweep"])
async def test_closed_registry_says_that_it_is_stopping(call):
    registry = EmbeddedRegistry()
    await registry.close()
    with pytest.raises(ControlPlaneUnavailable, match="stopping"):
        await getattr(registry, call)()
