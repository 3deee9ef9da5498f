"""The conformance suite, requests of operators: drain, undo, change of role, list of transfers."""

from __future__ import annotations

import pytest

from kvxfer.errors import InstanceLeaving, NoCapacity, UnknownInstance
from kvxfer.instances import ChangeCause, InstanceState, Reserved, Role

from .test_registry import LEASE, open_between, take

JOINING, READY = InstanceState.JOINING, InstanceState.READY
DRAINING = InstanceState.DRAINING


async def test_drained_instance_is_draining_until_its_deadline(fleet):
    await fleet.join("p")
    drained = await fleet.registry.drain("p", seconds=30)
    assert (drained.state, drained.drain_deadline) == (DRAINING, fleet.clock.unix() + 30)
    assert await fleet.registry.instance("p") == drained


async def test_worker_learns_of_the_drain_and_its_time_left_with_a_heartbeat(fleet):
    lease = await fleet.join("p")
    assert lease.drain_seconds is None
    await fleet.registry.drain("p", seconds=30)
    await fleet.pass_time(1)
    lease = await fleet.registry.heartbeat("p", lease.epoch, state=READY)
    assert (lease.state, lease.drain_seconds) == (DRAINING, pytest.approx(29))
    for _ in range(20):
        await fleet.pass_time(2)
        lease = await fleet.registry.heartbeat("p", lease.epoch)
    assert lease.drain_seconds == 0


async def test_drain_renews_no_lease(fleet):
    await fleet.join("p")
    await fleet.pass_time(LEASE - 1)
    await fleet.registry.drain("p", seconds=30)
    await fleet.pass_time(2)
    with pytest.raises(UnknownInstance):
        await fleet.registry.drain("p", seconds=30)


async def test_second_drain_replaces_the_deadline(fleet):
    await fleet.join("p")
    await fleet.registry.drain("p", seconds=30)
    again = await fleet.registry.drain("p", seconds=5)
    assert again.drain_deadline == fleet.clock.unix() + 5


async def test_open_transfers_outlive_the_drain_and_the_lease_counts_them(fleet):
    lease = await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    await open_between(fleet, "p", "d", blocks=3)
    await fleet.registry.drain("p", seconds=30)
    lease = await fleet.registry.heartbeat("p", lease.epoch)
    assert lease.reserved == Reserved(transfers=1, blocks=3)
    with pytest.raises(NoCapacity):
        await open_between(fleet, "p", "d", transfer_id="t-2")
    await fleet.registry.release("t-1")
    assert (await fleet.registry.heartbeat("p", lease.epoch)).reserved == Reserved()


async def test_role_changes_at_once_and_the_lease_reports_it(fleet):
    lease = await fleet.join("p")
    assert lease.role is Role.PREFILL
    changed = await fleet.registry.change_role("p", Role.DECODE)
    assert (changed.role, changed.epoch, changed.state) == (Role.DECODE, lease.epoch, READY)
    assert (await fleet.registry.instance("p")).role is Role.DECODE
    assert (await fleet.registry.heartbeat("p", lease.epoch)).role is Role.DECODE
    assert (await fleet.registry.statistics()).instances == {(Role.DECODE, READY): 1}


async def test_transfer_that_is_open_keeps_its_sides_over_a_change_of_role(fleet):
    await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    opened = await open_between(fleet, "p", "d")
    await fleet.registry.change_role("p", Role.DECODE)
    assert await fleet.registry.transfer("t-1") == opened


async def test_watchers_see_drain_and_role(fleet):
    lease = await fleet.join("p")
    await fleet.registry.drain("p", seconds=30)
    await fleet.registry.change_role("p", Role.DECODE)
    await fleet.registry.change_role("p", Role.DECODE)
    await fleet.join("q")
    drained, moved, joined = await take(fleet.registry, 3, lease.epoch)
    assert (drained.cause, drained.instance.state) == (ChangeCause.STATE_CHANGED, DRAINING)
    assert (moved.cause, moved.instance.role) == (ChangeCause.ROLE_CHANGED, Role.DECODE)
    assert joined.cause is ChangeCause.REGISTERED


async def test_operator_cannot_change_an_unknown_instance(fleet):
    with pytest.raises(UnknownInstance, match="'nobody'"):
        await fleet.registry.drain("nobody", seconds=1)
    with pytest.raises(UnknownInstance, match="'nobody'"):
        await fleet.registry.change_role("nobody", Role.DECODE)


async def test_open_transfers_are_listed_from_the_oldest(fleet):
    await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    assert await fleet.registry.transfers() == ()
    opened = []
    for number in (3, 1, 2):
        opened.append(await open_between(fleet, "p", "d", transfer_id=f"t-{number}", blocks=1))
        await fleet.pass_time(0.1)
    assert await fleet.registry.transfers() == tuple(opened)
    await fleet.registry.release("t-1")
    assert await fleet.registry.transfers() == (opened[0], opened[2])
    await fleet.pass_time(LEASE)
    assert await fleet.registry.transfers() == ()


# --- the undo of a drain ---------------------------------------------------------------------


async def test_undone_drain_ends_with_the_next_heartbeat(fleet):
    lease = await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    await fleet.registry.drain("p", seconds=30)
    undone = await fleet.registry.undrain("p")
    assert (undone.state, undone.drain_deadline) == (JOINING, None)
    assert (undone.epoch, await fleet.registry.instance("p")) == (lease.epoch, undone)
    with pytest.raises(NoCapacity):
        await open_between(fleet, "p", "d")
    told = await fleet.registry.heartbeat("p", lease.epoch, state=READY)
    assert (told.state, told.drain_seconds) == (READY, None)
    await open_between(fleet, "p", "d")


async def test_undo_without_a_drain_changes_nothing(fleet):
    lease = await fleet.join("p")
    before = await fleet.registry.instance("p")
    assert await fleet.registry.undrain("p") == before
    await fleet.join("q")
    (change,) = await take(fleet.registry, 1, lease.epoch)
    assert change.instance.instance_id == "q"


@pytest.mark.parametrize("drained", [True, False])
async def test_drain_of_a_worker_that_has_begun_to_leave_cannot_be_undone(fleet, drained):
    lease = await fleet.join("p")
    if drained:
        await fleet.registry.drain("p", seconds=30)
    await fleet.registry.heartbeat("p", lease.epoch, state=DRAINING)
    with pytest.raises(InstanceLeaving, match="'p' has begun to leave") as refused:
        await fleet.registry.undrain("p")
    assert refused.value.details == {"instance_id": "p"}
    assert (await fleet.registry.instance("p")).state is DRAINING


async def test_worker_that_leaves_during_the_undo_gets_no_transfer(fleet):
    lease = await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    await fleet.registry.drain("p", seconds=30)
    await fleet.registry.undrain("p")
    told = await fleet.registry.heartbeat("p", lease.epoch, state=DRAINING)
    assert told.state is DRAINING
    with pytest.raises(NoCapacity):
        await open_between(fleet, "p", "d")


async def test_watchers_see_the_undo(fleet):
    lease = await fleet.join("p")
    await fleet.registry.drain("p", seconds=30)
    await fleet.registry.undrain("p")
    await fleet.registry.heartbeat("p", lease.epoch, state=READY)
    changes = await take(fleet.registry, 3, lease.epoch)
    assert [change.instance.state for change in changes] == [DRAINING, JOINING, READY]
    assert {change.cause for change in changes} == {ChangeCause.STATE_CHANGED}
    assert changes[1].instance.drain_deadline is None


async def test_drain_of_an_unknown_instance_cannot_be_undone(fleet):
    with pytest.raises(UnknownInstance, match="'nobody'"):
        await fleet.registry.undrain("nobody")
