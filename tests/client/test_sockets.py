"""Both clients on real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvxfer.client import ControlPlaneClient, SyncControlPlaneClient
from kvxfer.errors import ControlPlaneUnavailable, UnknownInstance
from kvxfer.instances import InstanceState, Load, Role
from verify.processes.control_plane import LAYOUT, RunningControlPlane, worker

pytestmark = pytest.mark.native

READY = InstanceState.READY


@pytest.fixture
def server() -> Iterator[RunningControlPlane]:
    with RunningControlPlane(lease_seconds=600) as running:
        yield running


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL where nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_sync_client_has_the_same_methods(server):
    with SyncControlPlaneClient(server.url) as client:
        client.ready()
        lease = client.register(worker("p"), state=READY)
        client.register(worker("d", "decode"), state=READY)
        assert client.heartbeat("p", lease.epoch, load=Load(running=2)).role is Role.PREFILL
        assert [i.instance_id for i in client.instances(role=Role.DECODE)] == ["d"]
        assert client.instance("p").load == Load(running=2)
        assert client.shake_hands("p", "d").plan.layers == LAYOUT.num_layers
        opened = client.open_transfer(model="llama")
        assert [t.transfer_id for t in client.transfers()] == [opened.transfer_id]
        assert client.transfer(opened.transfer_id).model == "llama"
        client.release_transfer(opened.transfer_id)
        watch = client.watch()
        assert len(next(watch).instances) == 2
        client.change_role("p", Role.BOTH)
        assert next(watch).instance.role is Role.BOTH
        watch.close()
        client.drain("p")
        for instance in client.instances():
            client.deregister(instance.instance_id, instance.epoch)
        with pytest.raises(UnknownInstance):
            client.instance("p")


def test_sync_watch_without_a_control_plane_says_so(nobody):
    with SyncControlPlaneClient(nobody) as client, pytest.raises(ControlPlaneUnavailable):
        next(client.watch())


async def test_watch_without_a_control_plane_says_so(nobody):
    async with ControlPlaneClient(nobody) as client:
        with pytest.raises(ControlPlaneUnavailable):
            await anext(client.watch())


async def test_absent_control_plane_is_named_with_a_remedy(nobody):
    async with ControlPlaneClient(nobody, deadline=0) as client:
        with pytest.raises(ControlPlaneUnavailable) as error:
            await client.instances()
    assert nobody in str(error.value)
    assert "kvxfer serve" in str(error.value)


async def test_control_plane_that_does_not_answer_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with ControlPlaneClient(url, timeout=0.1, deadline=0) as client:
            with pytest.raises(ControlPlaneUnavailable, match="ReadTimeout"):
                await client.ready()
