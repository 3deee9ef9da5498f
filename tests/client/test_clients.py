from __future__ import annotations

import asyncio
import contextlib
import inspect
import re

import httpx2
import pytest

from kvxfer.client import ControlPlaneClient, SyncControlPlaneClient, calls
from kvxfer.errors import (
    ControlPlaneError,
    ControlPlaneUnavailable,
    InstanceExists,
    InvalidArgument,
    LayoutMismatch,
    NoCapacity,
    PromptTooLong,
    StaleEpoch,
    UnknownInstance,
    UnknownTransfer,
)
from kvxfer.instances import Change, ChangeCause, InstanceState, Load, Role, Snapshot
from kvxfer.ticket import verify_ticket
from tests.virtual_time import passes
from verify.processes.control_plane import CLUSTER_KEY, LAYOUT, worker

READY = InstanceState.READY


@pytest.fixture
async def client(network):
    """A client of a control plane where no lease ends."""
    async with network.control_plane(lease_seconds=600), network.client() as client:
        yield client


def answering(status: int, content: bytes = b"", **headers: str) -> ControlPlaneClient:
    def handler(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, content=content, headers=headers)

    return ControlPlaneClient("http://proxy:1", deadline=0, transport=httpx2.MockTransport(handler))


# --- instances -------------------------------------------------------------------------------


async def test_instance_is_read_as_it_was_registered(client):
    spec = worker("p", labels={"zone": "\u2028"}, fabrics=("tcp",))
    lease = await client.register(spec, state=READY)
    instance = await client.instance("p")
    assert {name: getattr(instance, name) for name in spec.__struct_fields__} == {
        name: getattr(spec, name) for name in spec.__struct_fields__
    }
    assert (instance.epoch, instance.state, instance.layout) == (lease.epoch, READY, LAYOUT)
    assert await client.instances() == (instance,)


async def test_heartbeat_takes_state_and_load(client):
    lease = await client.register(worker("p"))
    answer = await client.heartbeat(
        "p", lease.epoch, state=READY, load=Load(running=2, free_blocks=5)
    )
    assert (answer.epoch, answer.state) == (lease.epoch, READY)
    assert (await client.instance("p")).load == Load(running=2, free_blocks=5)


async def test_instances_are_filtered(client):
    await client.register(worker("p"), state=READY)
    await client.register(worker("d", "decode", model="qwen"))
    for query, ids in (
        ({"role": Role.DECODE}, ["d"]),
        ({"model": "llama"}, ["p"]),
        ({"state": InstanceState.JOINING}, ["d"]),
        ({}, ["d", "p"]),
    ):
        assert [i.instance_id for i in await client.instances(**query)] == ids


async def test_errors_come_back_as_their_class_with_their_details(client):
    lease = await client.register(worker("p"))
    with pytest.raises(InstanceExists) as exists:
        await client.register(worker("p"))
    assert exists.value.details == {
        "instance_id": "p",
        "epoch": lease.epoch,
        "lease_remaining_seconds": pytest.approx(600),
    }
    with pytest.raises(StaleEpoch, match="register again"):
        await client.heartbeat("p", lease.epoch - 1)
    with pytest.raises(StaleEpoch):
        await client.deregister("p", lease.epoch - 1)
    with pytest.raises(UnknownInstance, match="'nobody'"):
        await client.instance("nobody")
    with pytest.raises(InvalidArgument, match="num_blocks: Input should be"):
        await client.register(worker("q", num_blocks=0))


@pytest.mark.parametrize("instance_id", ["a/b", "a?b", "..", "a b", "é", ""])
async def test_strange_id_stays_one_part_of_the_path(client, instance_id):
    with pytest.raises((InvalidArgument, ControlPlaneError)):
        await client.deregister(instance_id, 1)


# --- transfers -------------------------------------------------------------------------------


async def test_transfer_is_opened_read_and_released(client):
    await client.register(worker("p"), state=READY)
    await client.register(worker("d", "decode"), state=READY)
    opened = await client.open_transfer(request_id="cmpl-7", model="llama", prompt_tokens=40)
    assert (opened.prefill.instance_id, opened.decode.instance_id) == ("p", "d")
    assert (opened.prefill_blocks, opened.decode_blocks) == (3, 3)
    ticket = verify_ticket(opened.ticket, CLUSTER_KEY, now=opened.created_at)
    assert ticket.transfer_id == opened.transfer_id
    assert ticket.expires_at == opened.expires_at
    assert (await client.transfer(opened.transfer_id)).request_id == "cmpl-7"
    await client.release_transfer(opened.transfer_id)
    again = await client.open_transfer(avoid=["p"])
    assert again.prefill.instance_id == "p", "there is no other"
    await client.release_transfer(again.transfer_id)
    for call in (client.transfer, client.release_transfer):
        with pytest.raises(UnknownTransfer):
            await call(opened.transfer_id)


async def test_refused_transfer_says_why(client):
    with pytest.raises(NoCapacity) as refusal:
        await client.open_transfer()
    assert refusal.value.details["reasons"] == ["no instance is registered"]
    await client.register(worker("p"), state=READY)
    await client.register(worker("d", "decode"), state=READY)
    with pytest.raises(PromptTooLong, match="shorten the prompt"):
        await client.open_transfer(prompt_tokens=100_000)


async def test_handshake_gives_the_plan_or_the_field_that_does_not_map(client):
    await client.register(worker("p"))
    await client.register(worker("d", "decode"))
    await client.register(worker("d16", "decode", dtype="float16"))
    hands = await client.shake_hands("p", "d")
    assert (hands.fabrics, hands.plan.bytes_per_cycle) == (("local", "tcp"), 4096)
    with pytest.raises(LayoutMismatch) as mismatch:
        await client.shake_hands("p", "d16")
    error = mismatch.value
    assert (error.field, error.prefill, error.decode) == (
        "dtype",
        "float32",
        "float16",
    )


# --- watch -----------------------------------------------------------------------------------


async def test_watch_is_a_snapshot_then_changes(client):
    lease = await client.register(worker("p"))
    watch = client.watch()
    snapshot = await anext(watch)
    assert snapshot == Snapshot(id=snapshot.id, instances=await client.instances())
    await client.heartbeat("p", lease.epoch, state=READY)
    change = await anext(watch)
    assert change == Change(
        id=change.id, cause=ChangeCause.STATE_CHANGED, instance=await client.instance("p")
    )
    await watch.aclose()


async def test_watch_resumes_after_an_id(client):
    first = await client.register(worker("p1"))
    await client.register(worker("p2"))
    watch = client.watch(first.epoch)
    assert (await anext(watch)).instance.instance_id == "p2"
    await watch.aclose()


async def test_watch_survives_a_restart_of_the_control_plane(network, clock):
    async with network.client() as client, contextlib.AsyncExitStack() as first:
        await first.enter_async_context(network.control_plane())
        watch = client.watch()
        await anext(watch)
        await client.register(worker("p"))
        assert (await anext(watch)).instance.instance_id == "p"
        await first.aclose()
        waiting = asyncio.ensure_future(anext(watch))
        await passes(60)
        assert not waiting.done()
        async with network.control_plane():
            came = clock.monotonic()
            assert await waiting == Snapshot(id=waiting.result().id, instances=())
            assert clock.monotonic() - came <= 1.5
            await client.register(worker("q"))
            assert (await anext(watch)).instance.instance_id == "q"
            await watch.aclose()


async def test_a_watch_that_falls_silent_is_opened_again(network, clock):
    """The control plane sends something every 15 s; after 45 s of silence it is gone."""
    silent = asyncio.Event()

    async def frozen(scope, receive, send):
        async def while_it_runs(message):
            if silent.is_set():
                await asyncio.Event().wait()
            await send(message)

        await running(scope, receive, while_it_runs)

    async with network.control_plane(lease_seconds=600), network.client() as client:
        running = network.apps["control-plane"]
        network.apps["control-plane"] = frozen
        watch = client.watch()
        await anext(watch)
        waiting = asyncio.ensure_future(anext(watch))
        await passes(300)
        assert not waiting.done()
        heard = clock.monotonic()
        silent.set()
        async with network.client() as other:
            network.apps["control-plane"] = running
            await other.register(worker("p"))
        assert (await waiting).instance.instance_id == "p"
        assert 45 - 15 <= clock.monotonic() - heard <= 45 + 1.5
        await watch.aclose()
        network.apps["control-plane"] = running


async def test_watch_without_a_control_plane_says_so(network, clock):
    async with network.client() as client:
        with pytest.raises(ControlPlaneUnavailable):
            await anext(client.watch())


async def test_watch_that_is_refused_raises_the_error(client):
    with pytest.raises(InvalidArgument):
        await anext(client.watch(-1))


# --- requests of operators -------------------------------------------------------------------


async def test_operators_calls(client):
    lease = await client.register(worker("p"), state=READY)
    await client.register(worker("d", "decode"), state=READY)
    opened = await client.open_transfer(prompt_tokens=16)
    (listed,) = await client.transfers(instance_id="p")
    assert listed == await client.transfer(opened.transfer_id)
    assert await client.transfers(instance_id="nobody") == ()
    moved = await client.change_role("d", Role.BOTH)
    assert moved == await client.instance("d")
    drained = await client.drain("p", deadline_seconds=5)
    assert (drained.state, drained.epoch) == (InstanceState.DRAINING, lease.epoch)
    assert drained.drain_deadline is not None
    with pytest.raises(UnknownInstance):
        await client.drain("nobody")


# --- both clients ----------------------------------------------------------------------------


def test_both_clients_have_every_call():
    described = {
        name
        for name, value in vars(calls).items()
        if callable(value) and not name.startswith("_") and inspect.getmodule(value) is calls
    } - {"Call"}
    assert len(described) == 25
    for kind in (ControlPlaneClient, SyncControlPlaneClient):
        for name in described:
            assert getattr(kind, name).__doc__ == getattr(calls, name).__doc__


async def test_method_keeps_its_name_and_arguments():
    async with ControlPlaneClient("http://c") as client:
        assert client.heartbeat.__name__ == "heartbeat"
        assert list(inspect.signature(client.heartbeat).parameters) == [
            "instance_id",
            "epoch",
            "state",
            "load",
            "secret",
        ]


# --- the control plane itself ----------------------------------------------------------------


async def test_ready_returns_if_the_control_plane_serves(client):
    await client.ready()


async def test_absent_control_plane_is_named_with_a_remedy(network, clock):
    async with network.client(deadline=10) as client:
        asked = clock.monotonic()
        with pytest.raises(ControlPlaneUnavailable) as error:
            await client.instances()
        # The next pause, of up to 2 s, would have ended too late.
        assert 8 <= clock.monotonic() - asked < 10
    assert client.url in str(error.value)
    assert "kvxfer serve" in str(error.value)


async def test_control_plane_that_does_not_answer_is_unavailable(network, clock):
    async def silent(scope, receive, send):
        await asyncio.Event().wait()

    network.apps["control-plane"] = silent
    async with network.client(timeout=5, deadline=0) as client:
        asked = clock.monotonic()
        with pytest.raises(ControlPlaneUnavailable, match="no answer in time"):
            await client.ready()
        assert clock.monotonic() - asked == pytest.approx(5)


@pytest.mark.parametrize(
    ("status", "error"),
    [(500, ControlPlaneError), (404, ControlPlaneError), (502, ControlPlaneUnavailable)],
)
async def test_error_of_another_server_is_reported_by_its_status(status, error):
    async with answering(status, b"<html>") as client:
        with pytest.raises(error, match=f"HTTP {status} without a problem document") as raised:
            await client.instances()
    assert type(raised.value) is error


@pytest.mark.parametrize("content", [b"<html>", b"{}", b'{"instances": 3}', b"\xff"])
async def test_invalid_answer_is_an_error(content):
    async with answering(200, content) as client:
        with pytest.raises(ControlPlaneError, match="is it a kvxfer control plane"):
            await client.instances()


async def test_code_of_a_later_control_plane_is_kept_in_the_text():
    problem = b'{"code": "too-hot", "detail": "cool down", "degrees": 90}'
    async with answering(409, problem) as client:
        with pytest.raises(ControlPlaneError, match=r"cool down \[too-hot\]") as error:
            await client.instances()
    assert error.value.details == {"degrees": 90}


async def test_error_has_the_request_id_that_the_logs_have(client):
    with pytest.raises(UnknownInstance) as error:
        await client.instance("nobody")
    assert re.fullmatch(r"[0-9a-f]{16}-\d+", error.value.request_id)


async def test_defect_of_the_control_plane_is_reported_with_its_request_id():
    problem = b'{"code": "internal-error", "detail": "its log says why"}'
    headers = {"X-Request-ID": "r-1"}
    async with answering(500, problem, **headers) as client:
        with pytest.raises(ControlPlaneError, match=r"why \[internal-error, request r-1\]"):
            await client.instances()


async def test_members_that_a_later_control_plane_adds_are_ignored(client):
    await client.register(worker("p"))
    raw = (await client._http.get(f"{client.url}/v1/instances/p")).content
    async with answering(200, raw[:-1] + b',"weights_version":7}') as later:
        assert (await later.instance("p")).instance_id == "p"


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://h", "http://[::1"])  # text
def test_invalid_url_is_refused(url):
    with pytest.raises(InvalidArgument, match="write it as http://HOST:PORT"):
        ControlPlaneClient(url)


def test_url_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVXFER_CONTROL_PLANE", "http://cp:1/")
    assert ControlPlaneClient().url == "http://cp:1"
    monkeypatch.delenv("KVXFER_CONTROL_PLANE")
    assert ControlPlaneClient().url == "http://127.0.0.1:8080"  # text
