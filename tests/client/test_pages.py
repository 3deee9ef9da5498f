"""Lists in pages are whole for the caller, and pages that did not change are not sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from kvxfer.client import Answer, ControlPlaneClient, SyncControlPlaneClient, calls
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import Instance, InstanceList, InstanceState
from verify.processes.control_plane import worker

Ask = Callable[..., Any]


def instance(name: str) -> Instance:
    return Instance.of(
        worker(name), epoch=1, state=InstanceState.READY, registered_at=0.0, heartbeat_at=0.0
    )


class Pages:
    """A control plane that lists one instance per page."""

    def __init__(self, names: str) -> None:
        self.names = names
        self.sent: list[str] = []
        self.stale: dict[str, str] = {}
        self.broken = False

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        at = int(request.url.params.get("cursor", "0"))
        if self.broken and at:
            return httpx2.Response(503)
        name, tag = self.names[at], f'W/"{self.names[at]}"'
        headers = {"ETag": tag, **self.stale} if at else {"ETag": tag}
        if at + 1 < len(self.names):
            query = {**request.url.params, "cursor": str(at + 1)}
            headers["Link"] = f'<{request.url.path}?{httpx2.QueryParams(query)}>; rel="next"'
        if request.headers.get("If-None-Match") == tag:
            return httpx2.Response(304, headers=headers)
        self.sent.append(f"{name} {request.url.params.get('model')}")
        content = msgspec.json.encode(InstanceList(instances=(instance(name),)))
        return httpx2.Response(200, content=content, headers=headers)


@pytest.fixture
def server() -> Pages:
    return Pages("abc")


@pytest.fixture(params=["async", "sync"])
def pages(request, server) -> Ask:
    """The pages of a call, by either client."""
    transport = httpx2.MockTransport(server)

    async def by_async(call: calls.Call[Any], known: list[Answer[Any]] | None = None) -> Any:
        async with ControlPlaneClient("http://cp:1", deadline=0, transport=transport) as client:
            return [page async for page in client.pages(call, known or [])]

    async def by_sync(call: calls.Call[Any], known: list[Answer[Any]] | None = None) -> Any:
        with SyncControlPlaneClient("http://cp:1", deadline=0, transport=transport) as client:
            return list(client.pages(call, known or []))

    return by_async if request.param == "async" else by_sync


def names(found: list[Answer[tuple[Instance, ...]]]) -> str:
    return "".join(each.instance_id for page in found for each in page.value)


async def test_each_page_is_asked_for_with_the_same_filters(pages, server):
    assert names(await pages(calls.instances(model="llama"))) == "abc"
    assert server.sent == ["a llama", "b llama", "c llama"]


async def test_pages_that_did_not_change_are_not_sent_again(pages, server):
    found = await pages(calls.instances())
    server.sent.clear()
    assert names(await pages(calls.instances(), found)) == "abc"
    assert server.sent == []
    server.names = "axcd"
    assert names(await pages(calls.instances(), found)) == "axcd"
    assert server.sent == ["x None", "d None"]


async def test_a_list_is_whole_and_as_stale_as_its_stalest_page(server):
    transport = httpx2.MockTransport(server)
    server.stale = {"Kvxfer-Stale-Seconds": "2.5"}
    async with ControlPlaneClient("http://cp:1", transport=transport) as client:
        answer = await client.ask(calls.instances())
        assert [each.instance_id for each in await client.instances()] == ["a", "b", "c"]
    assert [each.instance_id for each in answer.value] == ["a", "b", "c"]
    assert answer.stale_seconds == 2.5


async def test_a_list_that_breaks_off_is_an_error(pages, server):
    server.broken = True
    with pytest.raises(ControlPlaneUnavailable):
        await pages(calls.instances())


async def test_transfers_with_a_limit_are_one_page(server):
    assert calls.transfers().paged
    assert not calls.transfers(limit=5).paged
