"""A client with the addresses of several replicas asks another if one does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from kvxfer.client import ControlPlaneClient, SyncControlPlaneClient
from kvxfer.control_plane import DEFAULT_URL, ENVIRONMENT, Addresses
from kvxfer.errors import ControlPlaneUnavailable, InvalidArgument
from kvxfer.instances import InstanceState, Snapshot
from verify.processes.control_plane import worker

URLS = "http://one, http://other/"


async def hangs(*_: Any) -> None:
    await asyncio.Event().wait()


async def stops(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def client(network):
    """A client of two addresses that asks the first one next; only the second answers."""
    async with network.control_plane(lease_seconds=600):
        network.apps["other"] = network.apps["control-plane"]
        async with ControlPlaneClient(URLS, transport=network.transport(), deadline=2) as client:
            client._addresses._asked = 0
            yield client


@pytest.mark.parametrize("dead", [None, hangs, stops])
async def test_a_call_that_one_replica_does_not_answer_goes_to_the_other(
    network, client, clock, dead
):
    client._addresses._asked = 1
    lease = await client.register(worker("p"), state=InstanceState.READY)
    client._addresses._asked = 0
    if dead is not None:
        network.apps["one"] = dead
    came = clock.monotonic()
    await client.heartbeat("p", lease.epoch)
    assert clock.monotonic() - came <= 1.2, "there is time for both within one deadline"
    assert client.url == "http://other"
    for _ in range(10):
        await client.heartbeat("p", lease.epoch)
    assert clock.monotonic() - came <= 1.2, "the dead one is not asked again"


async def test_after_a_call_that_cannot_be_repeated_the_next_one_goes_to_the_other(network, client):
    for name, role in (("p", "prefill"), ("d", "decode")):
        await client.register(worker(name, role), state=InstanceState.READY)
    network.apps["one"] = hangs
    client._addresses._asked = 0
    with pytest.raises(ControlPlaneUnavailable, match="no control plane answers at http://one"):
        await client.open_transfer()
    assert (await client.open_transfer()).prefill.instance_id == "p"


async def test_a_watch_resumes_at_the_other(network, client):
    network.apps["one"] = network.apps["other"]
    watch = client.watch()
    assert isinstance(await anext(watch), Snapshot)
    assert client.url == "http://one"
    del network.apps["one"]
    await client.register(worker("p"), state=InstanceState.READY)
    assert client.url == "http://other"
    assert (await anext(watch)).instance.instance_id == "p"
    await watch.aclose()


async def test_if_none_answers_the_last_one_that_was_asked_is_named(client, network):
    del network.apps["other"]
    with pytest.raises(ControlPlaneUnavailable, match="no control plane answers at http://o"):
        await client.instances()


def test_the_sync_client_changes_to_the_other_too():
    asked = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.host)
        if request.url.host == "one":
            raise httpx2.ConnectError("refused", request=request)
        return httpx2.Response(200, json={"instances": []})

    with SyncControlPlaneClient(URLS, transport=httpx2.MockTransport(handler)) as client:
        client._addresses._asked = 0
        assert client.instances() == client.instances() == ()
    assert asked == ["one", "other", "other"]


def test_addresses_are_those_given_or_of_the_environment(monkeypatch):
    assert Addresses(None).all == (DEFAULT_URL,)
    monkeypatch.setenv(ENVIRONMENT, "https://a:1,https://b:1")
    assert Addresses(None).all == ("https://a:1", "https://b:1")
    assert Addresses(URLS).all == ("http://one", "http://other")
    assert {Addresses(URLS).current for _ in range(100)} == set(Addresses(URLS).all)


@pytest.mark.parametrize("urls", ["one:8080", "http://one,", "http://one,other", "http://a:x"])
def test_an_invalid_address_is_named(urls):
    with pytest.raises(InvalidArgument, match="the control plane's URL is"):
        Addresses(urls)
