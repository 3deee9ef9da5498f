"""A worker's place in the fleet, over a real control plane on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.client import ControlPlaneClient, Registration
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InstanceExists,
    InstanceLeaving,
    UnknownInstance,
)
from kvxfer.instances import Change, ChangeCause, InstanceState, Load, Role
from kvxfer.model_identity import ModelIdentity
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import CONTROL_PLANE, Network
from tests.virtual_time import VirtualClock, passes
from verify.processes.control_plane import worker

JOINING, READY, DRAINING = InstanceState.JOINING, InstanceState.READY, InstanceState.DRAINING
LEASE, INTERVAL = 6.0, 2.0
SLACK = 0.001  # rounding of timers


@pytest.fixture
async def control_plane(network: Network) -> AsyncIterator[EmbeddedRegistry]:
    async with network.control_plane(lease_seconds=LEASE) as registry:
        yield registry


@pytest.fixture
async def client(
    network: Network, control_plane: EmbeddedRegistry
) -> AsyncIterator[ControlPlaneClient]:
    async with network.client() as client:
        yield client


@pytest.fixture
def registered(client: ControlPlaneClient, clock: VirtualClock) -> Any:
    """A registration of worker p over `client`."""

    def registered(**options: Any) -> Registration:
        return Registration(client, worker("p"), clock=clock, **options)

    return registered


async def test_worker_is_in_the_fleet_inside_the_block_and_not_after(client, registered):
    async with registered() as registration:
        instance = await client.instance("p")
        assert (instance.epoch, instance.state) == (registration.epoch, READY)
        assert registration.registered
    assert not registration.registered
    with pytest.raises(UnknownInstance):
        await client.instance("p")


async def test_heartbeats_keep_the_lease(client, registered, clock):
    beats: list[float] = []

    def load() -> Load:
        beats.append(clock.monotonic())
        return Load(running=4)

    async with registered(load=load) as registration:
        await passes(10 * LEASE)
        instance = await client.instance("p")
        assert (instance.epoch, instance.load) == (registration.epoch, Load(running=4))
    gaps = [later - sooner for sooner, later in itertools.pairwise(beats)]
    # Up to a tenth sooner, so that a fleet does not beat in step.
    assert all(0.9 * INTERVAL - SLACK <= gap <= INTERVAL + SLACK for gap in gaps)
    assert len({round(gap, 3) for gap in gaps}) > len(gaps) / 2


async def test_worker_advances_at_once(client, registered, clock):
    async with registered(state=JOINING) as registration:
        began = clock.monotonic()
        assert (await client.instance("p")).state is JOINING
        for state in (READY, DRAINING):
            await registration.advance(state)
            assert (await client.instance("p")).state is state
        await registration.advance(READY)
        assert registration.state is DRAINING
        assert clock.monotonic() == began


async def test_a_new_model_is_a_new_epoch_in_the_same_place(client, registered, clock):
    epochs: list[int] = []
    async with registered(state=READY, on_epoch=epochs.append) as registration:
        before = clock.monotonic()
        model = ModelIdentity(checkpoint="a" * 32, weights_version=2)
        # A heartbeat is under way at the same time.
        await asyncio.gather(registration.heartbeat(), registration.take_model(model))
        assert clock.monotonic() - before < INTERVAL
        [instance] = await client.instances()
        assert (instance.identity, instance.state) == (model, READY)
        assert [instance.epoch] == epochs[1:] == [registration.epoch]
        await passes(LEASE + INTERVAL)
        assert [one.epoch for one in await client.instances()] == epochs[1:]


async def test_worker_learns_with_its_next_heartbeat_that_it_is_drained(client, registered):
    async with registered() as registration:
        beat = {"state": DRAINING, "secret": registration.secret}
        await client.heartbeat("p", registration.epoch, **beat)
        await passes(INTERVAL)
        assert registration.state is DRAINING


async def test_lost_lease_is_replaced_with_the_same_state_and_load(client, registered):
    epochs: list[int] = []
    async with registered(on_epoch=epochs.append, load=lambda: Load(waiting=2)) as registration:
        await client.deregister("p", registration.epoch)
        await passes(INTERVAL)
        first, second = epochs
        assert second > first
        assert registration.epoch == second
        await passes(INTERVAL)
        instance = await client.instance("p")
        assert (instance.epoch, instance.state, instance.load) == (second, READY, Load(waiting=2))


async def test_a_heartbeat_that_hangs_does_not_delay_the_next(registered, clock, monkeypatch):
    beats: list[float] = []

    async def hangs() -> None:
        beats.append(clock.monotonic())
        await passes(0.95 * INTERVAL)

    async with registered() as registration:
        monkeypatch.setattr(registration, "heartbeat", hangs)
        await passes(20 * INTERVAL)
    gaps = [later - sooner for sooner, later in itertools.pairwise(beats)]
    assert len(gaps) >= 19
    assert all(gap <= INTERVAL + SLACK for gap in gaps)


async def test_draining_worker_that_lost_its_lease_is_draining_again(client, registered):
    async with registered() as registration:
        await registration.advance(DRAINING)
        await client.deregister("p", registration.epoch)
        await passes(INTERVAL)
        assert (await client.instance("p")).state is DRAINING


# --- the control plane comes and goes --------------------------------------------------------


@pytest.fixture
async def passing(network: Network) -> AsyncIterator[contextlib.AsyncExitStack]:
    """A stack with a control plane, which stops when the stack is closed."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(network.control_plane(lease_seconds=LEASE))
        yield stack


@pytest.mark.parametrize("away", [0.5, LEASE, 600.0])
async def test_worker_is_back_within_a_heartbeat_of_the_control_planes_return(
    network, passing, clock, away
):
    epochs: list[int] = []
    async with network.client() as client:
        async with Registration(client, worker("p"), on_epoch=epochs.append, clock=clock):
            await passing.aclose()
            await passes(away)
            async with network.control_plane(lease_seconds=LEASE):
                await passes(INTERVAL + SLACK)
                before, after = epochs
                assert after > before
                assert (await client.instance("p")).epoch == after
            # The control plane is gone again, and the worker still leaves in time.
            left = clock.monotonic()
        assert clock.monotonic() - left <= 2


async def test_trouble_is_logged_once_not_with_every_heartbeat(network, passing, clock, caplog):
    async with (
        network.client() as client,
        Registration(client, worker("p"), clock=clock),
    ):
        await passing.aclose()
        with caplog.at_level(logging.INFO, logger="kvxfer.registration"):
            await passes(10 * LEASE)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "kvxfer serve" in caplog.text
            async with network.control_plane(lease_seconds=LEASE):
                await passes(INTERVAL + SLACK)
                assert caplog.records[-1].message == "instance p is registered again"


async def test_worker_may_start_before_the_control_plane(network, clock):
    async with network.client() as client:
        registration = Registration(client, worker("p"), clock=clock)
        entering = asyncio.create_task(registration.__aenter__())
        await passes(7)
        assert not entering.done()
        async with network.control_plane():
            came = clock.monotonic()
            await entering
            assert clock.monotonic() - came <= 2.25
            assert (await client.instance("p")).epoch == registration.epoch
            await registration.__aexit__(None, None, None)


@pytest.mark.parametrize("patience", [0.0, 10.0])
async def test_control_plane_that_stays_unavailable_is_an_error_after_the_patience(
    network, clock, patience
):
    async with network.client() as client:
        began = clock.monotonic()
        with pytest.raises(ControlPlaneUnavailable, match=CONTROL_PLANE):
            async with Registration(client, worker("p"), patience=patience, clock=clock):
                pass
    assert patience - 0.25 <= clock.monotonic() - began <= patience + 0.25


async def test_slow_control_plane_is_waited_for(control_plane, registered, monkeypatch):
    really = control_plane.register

    async def register(*arguments, **named):
        await passes(1.9)
        return await really(*arguments, **named)

    monkeypatch.setattr(control_plane, "register", register)
    async with registered(patience=5) as registration:
        assert registration.registered


# --- clocks ----------------------------------------------------------------------------------


class WrongClock(VirtualClock):
    """The clock of a host, off by `wrong` seconds."""

    def __init__(self, right: VirtualClock) -> None:
        super().__init__()
        self.wrong = 0.0
        self._right = right

    def monotonic(self) -> float:
        return self._right.monotonic()

    def unix(self) -> float:
        return self._right.unix() + self.wrong


@pytest.mark.parametrize(("wrong", "how"), [(90.0, "90.0 s ahead of"), (-90.0, "90.0 s behind")])
async def test_a_clock_that_differs_from_the_control_planes_is_logged_once(
    client, clock, caplog, wrong, how
):
    clock_here = WrongClock(clock)
    async with Registration(client, worker("p"), clock=clock_here):
        await passes(LEASE)
        assert caplog.messages == []
        clock_here.wrong = 4.0
        await passes(LEASE)
        assert caplog.messages == []
        clock_here.wrong = wrong
        await passes(3 * LEASE)
        [told] = caplog.messages
        assert f"the clock of this host is {how} the control plane's" in told
        clock_here.wrong = 0.0
        await passes(LEASE)
        clock_here.wrong = wrong
        await passes(LEASE)
        assert len(caplog.messages) == 2


# --- an id that is held ----------------------------------------------------------------------


async def test_id_of_a_crashed_worker_is_taken_over_when_its_lease_ends(client, registered, clock):
    crashed = await client.register(worker("p"), incarnation="crashed")
    await passes(2)
    began = clock.monotonic()
    async with registered() as registration:
        assert registration.epoch > crashed.epoch
        assert LEASE - 2 < clock.monotonic() - began <= LEASE - 2 + 0.3


async def test_id_is_waited_for_as_long_as_its_holder_is_silent(network, clock):
    """A control plane that stood still extends every lease by that time."""
    async with (
        network.control_plane(lease_seconds=LEASE, silence_seconds=2),
        network.client() as client,
    ):
        await client.register(worker("p"), incarnation="crashed")
        began = clock.monotonic()
        registration = Registration(client, worker("p"), clock=clock)
        entering = asyncio.create_task(registration.__aenter__())
        for _ in range(2):
            await passes(3)
            clock.advance(4)
        await entering
        assert LEASE + 4 < clock.monotonic() - began <= LEASE + 8 + 2
        await registration.__aexit__(None, None, None)


async def test_id_of_a_live_worker_is_refused(client, registered, clock):
    async with registered() as holder:
        began = clock.monotonic()
        with pytest.raises(InstanceExists, match="'p' is alive at"):
            async with registered():
                pass
        assert clock.monotonic() - began <= LEASE + 0.3
        assert (await client.instance("p")).epoch == holder.epoch


async def test_registration_whose_answer_was_lost_is_repeated(client, registered, clock):
    """The same process may ask again at once: it does not wait for its former lease."""
    registration = registered()
    began = clock.monotonic()
    await client.register(worker("p"), incarnation=registration._incarnation)
    async with registration:
        assert (await client.instance("p")).epoch == registration.epoch
        assert clock.monotonic() == began


# --- failures in the worker ------------------------------------------------------------------


async def test_a_changed_load_is_reported_at_once_but_not_too_often(client, registered, clock):
    beats: list[float] = []

    def load() -> Load:
        beats.append(clock.monotonic())
        return Load(free_blocks=len(beats))

    async with registered(load=load) as registration:
        began = clock.monotonic()
        await passes(1.0)
        assert (await client.instance("p")).load.free_blocks == 1, (
            "it is reported after registration"
        )
        changed = clock.monotonic()
        for _ in range(10):
            registration.load_changed()
            await passes(0.05)
        await passes(1.0)
        assert (await client.instance("p")).load.free_blocks == len(beats) == 4
    first, *others = beats
    assert first - began <= 0.25 + SLACK
    assert others == pytest.approx([changed, changed + 0.25, changed + 0.5])


async def test_load_that_cannot_be_read_costs_no_lease(client, registered, caplog):
    def broken() -> Load:
        raise RuntimeError("no such counter")

    watch = client.watch()
    await anext(watch)
    async with registered(load=broken) as registration:
        await passes(3 * LEASE)
        assert registration.registered
    causes = []
    while ChangeCause.DEREGISTERED not in causes:
        change = await anext(watch)
        assert isinstance(change, Change)
        causes.append(change.cause)
    await watch.aclose()
    assert causes == [ChangeCause.REGISTERED, ChangeCause.DEREGISTERED]
    assert "no such counter" in caplog.text


async def test_callback_that_raises_does_not_end_the_heartbeats(client, registered):
    epochs: list[int] = []

    def broken(epoch: int) -> None:
        epochs.append(epoch)
        if len(epochs) > 1:
            raise RuntimeError("broken callback")

    async with registered(on_epoch=broken):
        for count in (1, 2, 3):
            assert len(epochs) == count
            await client.deregister("p", epochs[-1])
            await passes(INTERVAL)
        assert (await client.instance("p")).epoch == epochs[3]


# --- requests of operators -------------------------------------------------------------------


async def test_new_role_reaches_the_worker_and_is_kept_over_a_lost_lease(client, registered):
    roles: list[Role] = []
    async with registered(on_role=roles.append) as registration:
        await client.change_role("p", Role.DECODE)
        await passes(2 * INTERVAL)
        assert (registration.role, roles) == (Role.DECODE, [Role.DECODE])
        await client.deregister("p", registration.epoch)
        await passes(INTERVAL)
        assert (await client.instance("p")).role is Role.DECODE
        assert roles == [Role.DECODE]


async def test_idle_worker_that_is_drained_may_leave_with_its_next_heartbeat(client, registered):
    async with registered(load=Load) as registration:
        await client.drain("p", deadline_seconds=600)
        async with asyncio.timeout(INTERVAL):
            await registration.drained()
        assert registration.state is DRAINING


async def test_drained_worker_stays_for_its_requests_and_for_those_on_their_way(
    client, registered, clock
):
    load = Load(running=1)
    async with (
        Registration(client, worker("d", "decode"), clock=clock),
        registered(load=lambda: load) as registration,
    ):
        opened = await client.open_transfer()
        await client.drain("p", deadline_seconds=600)
        leaving = asyncio.create_task(registration.drained())
        await passes(5 * INTERVAL)
        assert not leaving.done()
        load = Load()
        await passes(5 * INTERVAL)
        assert not leaving.done(), "the transfer's request may still come"
        await client.release_transfer(opened.transfer_id)
        async with asyncio.timeout(INTERVAL):
            await leaving


async def test_deadline_of_a_drain_ends_it_even_without_the_control_plane(network, passing, clock):
    async with (
        network.client() as client,
        Registration(client, worker("p"), load=lambda: Load(running=1), clock=clock) as registered,
    ):
        asked = clock.monotonic()
        await client.drain("p", deadline_seconds=60)
        await passes(INTERVAL)
        await passing.aclose()
        await registered.drained()
        assert 60 <= clock.monotonic() - asked <= 60 + 2 * INTERVAL


async def test_worker_that_nobody_drains_stays(registered):
    async with registered(load=Load) as registration:
        leaving = asyncio.create_task(registration.drained())
        await passes(10 * LEASE)
        assert not leaving.done()
        leaving.cancel()


async def test_worker_learns_with_its_next_heartbeat_that_its_drain_is_undone(client, registered):
    async with registered(load=lambda: Load(running=1)) as registration:
        leaving = asyncio.create_task(registration.drained())
        await client.drain("p", deadline_seconds=LEASE)
        await passes(INTERVAL)
        assert registration.state is DRAINING
        assert (await client.undrain("p")).state is JOINING
        await passes(INTERVAL)
        assert (registration.state, (await client.instance("p")).state) == (READY, READY)
        await passes(2 * LEASE)
        assert not leaving.done()
        await client.drain("p", deadline_seconds=LEASE)
        await passes(LEASE + INTERVAL)
        assert leaving.done()


async def test_worker_reports_that_it_leaves_before_it_leaves(client, registered):
    load = Load(running=1)
    async with registered(load=lambda: load) as registration:
        await client.drain("p", deadline_seconds=600)
        await passes(INTERVAL)
        load = Load()
        await registration.drained()
        with pytest.raises(InstanceLeaving):
            await client.undrain("p")
        # Another heartbeat changes nothing.
        await registration.heartbeat()
        assert (await client.instance("p")).state is DRAINING


async def test_drain_of_a_worker_that_stays_can_be_undone(client, registered):
    """Workers of vLLM and SGLang stay: they end only when they are stopped."""
    async with registered(load=Load) as registration:
        await client.drain("p", deadline_seconds=INTERVAL)
        await passes(3 * INTERVAL)
        assert registration.state is DRAINING
        await client.undrain("p")
        await passes(INTERVAL)
        assert (await client.instance("p")).state is READY


async def test_drain_lasts_over_a_lost_lease(client, registered, clock):
    async with registered(load=lambda: Load(running=1)) as registration:
        began = clock.monotonic()
        await client.drain("p", deadline_seconds=20)
        await passes(INTERVAL)
        await client.deregister("p", registration.epoch)
        await passes(INTERVAL)
        assert (await client.instance("p")).state is DRAINING
        await registration.drained()
        assert 20 <= clock.monotonic() - began <= 20 + INTERVAL
