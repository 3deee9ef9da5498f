from __future__ import annotations

import pytest

from kvxfer.errors import ControlPlaneUnavailable, UnknownBlockTable
from kvxfer.instances import InstanceState, Role
from kvxfer.scheduler.choice import EMBEDDED, make_registry
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest
from tests.virtual_time import passes
from verify.processes.control_plane import worker


async def test_epochs_and_change_ids_ascend_over_a_restart_of_the_process(clock):
    before = EmbeddedRegistry(clock=clock)
    epochs = [(await before.register(worker(f"p-{i}"))).epoch for i in range(1000)]
    clock.advance(0.5)
    after = EmbeddedRegistry(clock=clock)
    snapshot = await anext(after.watch())
    assert snapshot.id > max(epochs)
    assert (await after.register(worker("p-0"))).epoch > max(epochs)


async def test_watcher_from_before_a_restart_gets_a_snapshot(clock):
    before = EmbeddedRegistry(clock=clock)
    seen = (await before.register(worker("p"))).epoch
    clock.advance(0.5)
    after = EmbeddedRegistry(clock=clock)
    await after.register(worker("q"))
    snapshot = await anext(after.watch(seen))
    assert [i.instance_id for i in snapshot.instances] == ["q"]


async def test_wall_clock_that_jumps_ends_no_lease(clock):
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


async def test_no_lease_ends_while_the_process_stands_still(clock):
    registry = EmbeddedRegistry(LeasePolicy(6.0), clock=clock, silence_seconds=1.0)
    lease = await registry.register(worker("p"), state=InstanceState.READY)
    await registry.register(worker("d", Role.DECODE), state=InstanceState.READY)
    await open_transfer(registry, TransferRequest(), seconds=30, clock=clock)
    for _ in range(3):
        clock.advance(60)  # the first caller is not the worker
        assert len(await registry.instances()) == 2
    assert await registry.transfers() == (), "its ticket has expired"
    assert (await registry.heartbeat("p", lease.epoch)).epoch == lease.epoch
    for _ in range(12):
        assert await registry.instances()
        await passes(0.5)
        await registry.sweep()
    assert await registry.instances() == ()


async def test_a_wait_for_a_table_ends_after_exactly_its_time(clock):
    registry = EmbeddedRegistry(LeasePolicy(60.0), clock=clock)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        await registry.register(worker(name, role), state=InstanceState.READY)
    opened = await open_transfer(registry, TransferRequest(), seconds=30, clock=clock)
    began = clock.monotonic()
    with pytest.raises(UnknownBlockTable):
        await registry.block_table(opened.transfer_id, wait_seconds=4)
    assert clock.monotonic() == began + 4


async def test_a_registry_that_serves_notices_that_it_stood_still():
    registry = make_registry(EMBEDDED, LeasePolicy(6.0))
    assert isinstance(registry, EmbeddedRegistry)
    assert registry._silence_seconds == 1.0
