from __future__ import annotations

import asyncio
import logging
import socket
import time

import pytest

from kvxfer.api.tokens import watch_tokens
from kvxfer.client import ControlPlaneClient, Credentials
from kvxfer.errors import (
    ControlPlaneUnavailable,
    Forbidden,
    InstanceExists,
    Unauthenticated,
    UnknownInstance,
)
from kvxfer.instances import Change, ChangeCause, InstanceState, Load, Role
from kvxfer.registration import Registration
from tests.control_plane import RunningControlPlane, worker
from tests.virtual_time import VirtualClock
from verify.polling import eventually

pytestmark = pytest.mark.native


JOINING, READY, DRAINING = InstanceState.JOINING, InstanceState.READY, InstanceState.DRAINING


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def server(clock):
    """Heartbeats come every 50 ms; leases end only when the clock is moved."""
    with RunningControlPlane(lease_seconds=0.15, clock=clock) as running:
        yield running


@pytest.fixture
def slow_server():
    """No heartbeat comes within a test unless it asks for one."""
    with RunningControlPlane(lease_seconds=600, clock=VirtualClock()) as running:
        yield running


class Epochs:
    """Hears of registrations."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.heard = 0

    def __call__(self, epoch: int) -> None:
        self.heard += 1
        self.queue.put_nowait(epoch)

    async def next(self) -> int:
        return await asyncio.wait_for(self.queue.get(), 10)


async def test_worker_is_in_the_fleet_inside_the_block_and_not_after(slow_server):
    async with ControlPlaneClient(slow_server.url) as client:
        async with Registration(client, worker("p")) as registration:
            instance = await client.instance("p")
            assert (instance.epoch, instance.state) == (registration.epoch, READY)
            assert registration.registered
        assert not registration.registered
        with pytest.raises(UnknownInstance):
            await client.instance("p")


async def test_heartbeats_keep_the_lease(server, clock):
    beats = asyncio.Queue()

    def load() -> Load:
        beats.put_nowait(None)
        return Load(running=4)

    async with (
        ControlPlaneClient(server.url) as client,
        Registration(client, worker("p"), load=load) as registration,
    ):
        for _ in range(10):
            await asyncio.wait_for(beats.get(), 10)
            clock.advance(0.06)  # four leases in all
        instance = await client.instance("p")
        assert (instance.epoch, instance.load) == (registration.epoch, Load(running=4))


async def test_worker_advances_at_once(slow_server):
    async with (
        ControlPlaneClient(slow_server.url) as client,
        Registration(client, worker("p"), state=JOINING) as registration,
    ):
        assert (await client.instance("p")).state is JOINING
        for state in (READY, DRAINING):
            await registration.advance(state)
            assert (await client.instance("p")).state is state
        await registration.advance(READY)
        assert registration.state is DRAINING


async def test_worker_learns_that_it_is_drained(slow_server):
    async with (
        ControlPlaneClient(slow_server.url) as client,
        Registration(client, worker("p")) as registration,
    ):
        await client.heartbeat("p", registration.epoch, state=DRAINING)
        await registration.heartbeat()
        assert registration.state is DRAINING


async def test_lost_lease_is_taken_anew_with_state_and_load(server):
    epochs = Epochs()
    async with (
        ControlPlaneClient(server.url) as client,
        Registration(
            client, worker("p"), on_epoch=epochs, load=lambda: Load(waiting=2)
        ) as registration,
    ):
        first = await epochs.next()
        await client.deregister("p", first)
        second = await epochs.next()
        assert second > first
        assert registration.epoch == second

        async def load() -> Load:
            await registration.heartbeat()
            return (await client.instance("p")).load

        assert await eventually(load) == Load(waiting=2)
        instance = await client.instance("p")
        assert (instance.epoch, instance.state) == (second, READY)


@pytest.fixture
def steady_server():
    """A heartbeat comes each second."""
    with RunningControlPlane(lease_seconds=3) as running:
        yield running


async def test_a_heartbeat_that_hangs_does_not_put_off_the_next(steady_server, monkeypatch):
    beats: asyncio.Queue[float] = asyncio.Queue()

    async def hangs() -> None:
        beats.put_nowait(time.monotonic())
        await asyncio.sleep(0.9)

    async with (
        ControlPlaneClient(steady_server.url) as client,
        Registration(client, worker("p")) as registration,
    ):
        monkeypatch.setattr(registration, "heartbeat", hangs)
        begun = [await asyncio.wait_for(beats.get(), 10) for _ in range(4)]
    assert begun[3] - begun[0] < 3 * 1.5


async def test_draining_worker_that_lost_its_lease_is_draining_again(slow_server):
    async with (
        ControlPlaneClient(slow_server.url) as client,
        Registration(client, worker("p")) as registration,
    ):
        await registration.advance(DRAINING)
        await client.deregister("p", registration.epoch)
        await registration.heartbeat()
        assert (await client.instance("p")).state is DRAINING


async def test_worker_goes_on_while_the_control_plane_is_away_and_is_back_with_it(server):
    epochs = Epochs()
    async with (
        ControlPlaneClient(server.url) as client,
        Registration(client, worker("p"), on_epoch=epochs),
    ):
        before = await epochs.next()
        await asyncio.to_thread(server.stop)
        later = VirtualClock(unix=1_900_000_000.0)
        with RunningControlPlane(port=server.port, lease_seconds=600, clock=later):
            after = await epochs.next()
            assert after > before
            assert (await client.instance("p")).epoch == after
        # The control plane is gone once more: leaving takes no harm from it.


async def test_trouble_is_logged_once_not_with_every_heartbeat(slow_server, caplog):
    async with (
        ControlPlaneClient(slow_server.url) as client,
        Registration(client, worker("p")) as registration,
    ):
        await asyncio.to_thread(slow_server.stop)
        with caplog.at_level(logging.INFO, logger="kvxfer.registration"):
            for _ in range(3):
                await registration.heartbeat()
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "kvxfer serve" in caplog.text
            with RunningControlPlane(port=slow_server.port, lease_seconds=600):
                await registration.heartbeat()
                assert caplog.records[-1].message == "instance p is registered again"


async def test_worker_may_start_before_the_control_plane():
    with socket.socket() as unused:
        unused.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    async with ControlPlaneClient(f"http://127.0.0.1:{port}") as client:
        registration = Registration(client, worker("p"))
        entering = asyncio.ensure_future(registration.__aenter__())
        with RunningControlPlane(port=port):
            await asyncio.wait_for(entering, 10)
            assert (await client.instance("p")).epoch == registration.epoch
            await registration.__aexit__(None, None, None)


async def test_control_plane_that_stays_away_is_an_error_after_patience():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with ControlPlaneClient(url) as client:
            with pytest.raises(ControlPlaneUnavailable, match=url):
                async with Registration(client, worker("p"), patience=0):
                    pass


async def test_control_plane_that_takes_its_time_is_waited_for(slow_server, monkeypatch):
    really = slow_server.registry.register

    async def register(*arguments, **named):
        await asyncio.sleep(0.5)
        return await really(*arguments, **named)

    monkeypatch.setattr(slow_server.registry, "register", register)
    async with (
        ControlPlaneClient(slow_server.url) as client,
        Registration(client, worker("p"), patience=5) as registration,
    ):
        assert registration.registered


async def test_id_of_a_crashed_worker_is_taken_over_when_its_lease_ends():
    with RunningControlPlane(lease_seconds=0.3) as server:
        async with ControlPlaneClient(server.url) as client:
            crashed = await client.register(worker("p"), incarnation="crashed")
            async with Registration(client, worker("p")) as registration:
                assert registration.epoch > crashed.epoch


async def test_id_of_a_live_worker_is_refused(server):
    async with (
        ControlPlaneClient(server.url) as client,
        Registration(client, worker("p")) as holder,
    ):
        with pytest.raises(InstanceExists, match="choose another instance_id"):
            async with Registration(client, worker("p")):
                pass
        assert (await client.instance("p")).epoch == holder.epoch


async def test_registration_whose_answer_was_lost_is_repeated(slow_server):
    """The same process may ask again at once: nobody waits for a lease that is its own."""
    async with ControlPlaneClient(slow_server.url) as client:
        registration = Registration(client, worker("p"))
        await client.register(worker("p"), incarnation=registration._incarnation)
        async with registration:
            assert (await client.instance("p")).epoch == registration.epoch


async def test_load_that_cannot_be_read_costs_no_lease(server, caplog):
    def broken() -> Load:
        raise RuntimeError("no such counter")

    async with ControlPlaneClient(server.url) as client:
        watch = client.watch()
        await anext(watch)
        async with Registration(client, worker("p"), load=broken) as registration:
            await registration.heartbeat()
            assert registration.registered
        causes = []
        while ChangeCause.DEREGISTERED not in causes:
            change = await asyncio.wait_for(anext(watch), 10)
            assert isinstance(change, Change)
            causes.append(change.cause)
        await watch.aclose()
    assert causes == [ChangeCause.REGISTERED, ChangeCause.DEREGISTERED]
    assert "no such counter" in caplog.text


async def test_callback_that_raises_does_not_end_the_heartbeats(server):
    epochs = Epochs()

    def broken(epoch: int) -> None:
        epochs(epoch)
        if epochs.heard > 1:
            raise RuntimeError("broken callback")

    async with (
        ControlPlaneClient(server.url) as client,
        Registration(client, worker("p"), on_epoch=broken),
    ):
        for _ in range(3):
            await client.deregister("p", await epochs.next())
        await epochs.next()


# --- what operators ask for ------------------------------------------------------------------


async def test_new_role_is_heard_of_and_kept_over_a_lost_lease(slow_server):
    roles: list[Role] = []
    async with (
        ControlPlaneClient(slow_server.url) as client,
        Registration(client, worker("p"), on_role=roles.append) as registration,
    ):
        await client.change_role("p", Role.DECODE)
        await registration.heartbeat()
        await registration.heartbeat()
        assert (registration.role, roles) == (Role.DECODE, [Role.DECODE])
        await client.deregister("p", registration.epoch)
        await registration.heartbeat()
        assert (await client.instance("p")).role is Role.DECODE
        assert roles == [Role.DECODE]


async def test_idle_worker_that_is_drained_may_leave_at_once(server):
    async with (
        ControlPlaneClient(server.url) as client,
        Registration(client, worker("p"), load=Load) as registration,
    ):
        await client.drain("p", deadline_seconds=600)
        await asyncio.wait_for(registration.drained(), 10)
        assert registration.state is DRAINING


async def test_drained_worker_stays_for_its_requests_and_for_those_on_their_way(server):
    load = Load(running=1)
    async with (
        ControlPlaneClient(server.url) as client,
        Registration(client, worker("p"), load=lambda: load) as registration,
    ):
        await client.register(worker("d", "decode"), state=READY)
        opened = await client.open_transfer()
        await client.drain("p", deadline_seconds=600)
        leaving = asyncio.ensure_future(registration.drained())
        await beats(registration, 3)
        assert not leaving.done()
        load = Load()
        await beats(registration, 3)
        assert not leaving.done(), "the transfer's request may still come"
        await client.release_transfer(opened.transfer_id)
        await asyncio.wait_for(leaving, 10)


async def test_deadline_of_a_drain_ends_it_without_the_control_plane_too(server):
    async with (
        ControlPlaneClient(server.url) as client,
        Registration(client, worker("p"), load=lambda: Load(running=1)) as registration,
    ):
        await client.drain("p", deadline_seconds=0.5)
        while registration._drain_deadline is None:
            await registration.heartbeat()
        await asyncio.to_thread(server.stop)
        await asyncio.wait_for(registration.drained(), 10)


async def test_worker_that_nobody_drains_stays(server):
    async with (
        ControlPlaneClient(server.url) as client,
        Registration(client, worker("p"), load=Load) as registration,
    ):
        leaving = asyncio.ensure_future(registration.drained())
        await beats(registration, 3)
        assert not leaving.done()
        leaving.cancel()


async def beats(registration: Registration, count: int) -> None:
    """Returns when so many heartbeats of its own have come and gone."""
    beaten = asyncio.Queue()
    look = registration._look_at_drain
    registration._look_at_drain = lambda: (look(), beaten.put_nowait(None))
    for _ in range(count):
        await asyncio.wait_for(beaten.get(), 10)
    registration._look_at_drain = look


# --- tokens ----------------------------------------------------------------------------------


async def test_worker_keeps_its_lease_while_its_token_is_exchanged(tmp_path, caplog):
    accepted, held = tmp_path / "tokens", tmp_path / "token"
    accepted.write_text("node worker token-of-last-month\n")
    held.write_text("token-of-last-month\n")
    tokens = watch_tokens(accepted)
    with RunningControlPlane(lease_seconds=600, tokens=tokens) as server:
        credentials = Credentials(token_file=held)
        async with (
            ControlPlaneClient(server.url, credentials=credentials) as client,
            Registration(client, worker("p")) as registration,
        ):
            epoch = registration.epoch
            accepted.write_text("node worker token-of-this-month\n")
            tokens.refresh()
            await registration.heartbeat()
            assert "does not know this token" in caplog.text
            assert "month" not in caplog.text
            held.write_text("token-of-this-month\n")
            with caplog.at_level(logging.INFO, logger="kvxfer.registration"):
                await registration.heartbeat()
            assert caplog.records[-1].message == "instance p is registered again"
            assert (registration.epoch, registration.registered) == (epoch, True)


async def test_worker_without_the_right_token_does_not_start(tmp_path):
    accepted = tmp_path / "tokens"
    accepted.write_text("node router token-of-a-router\n")
    with RunningControlPlane(tokens=watch_tokens(accepted)) as server:
        for token, error in ((None, Unauthenticated), ("token-of-a-router", Forbidden)):
            credentials = Credentials(token=token)
            async with ControlPlaneClient(server.url, credentials=credentials) as client:
                with pytest.raises(error):
                    async with Registration(client, worker("p")):
                        pass
