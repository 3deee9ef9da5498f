"""Requests and the bytes of their bodies count before they are read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
from starlette.types import Message

from kvxfer.instances import Role
from tests.network import Network
from tests.virtual_time import passes

from .test_api import DECODES, PREFILLS, error_of

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
BODY = json.dumps({"model": "llama", "prompt": [1, 2, 3], "max_tokens": 4}).encode()


@pytest.fixture
async def fleet(network: Network):
    async with network.control_plane(lease_seconds=600):
        await network.join("p", Role.PREFILL, PREFILLS)
        await network.join("d", Role.DECODE, DECODES)
        yield


class Unfinished:
    """A request whose body does not end before finish()."""

    def __init__(self, client: httpx2.AsyncClient, padding: int = 0) -> None:
        self._go_on = asyncio.Event()
        self._padding = padding
        call = client.post(COMPLETIONS, content=self._parts(), headers=JSON)
        self.answer = asyncio.create_task(call)

    async def _parts(self) -> AsyncIterator[bytes]:
        yield b" " * self._padding
        yield BODY[:10]
        await self._go_on.wait()
        yield BODY[10:]

    async def finish(self) -> httpx2.Response:
        """Ends the body; returns the answer, once the router does not count the request any
        more."""
        self._go_on.set()
        answer = await self.answer
        await passes(0.1)
        return answer


async def metrics(client: httpx2.AsyncClient) -> str:
    return (await client.get("/metrics")).text


async def test_bodies_that_do_not_end_count_as_requests(network, fleet):
    async with network.routed(max_requests=2) as client:
        kept = [Unfinished(client) for _ in range(2)]
        await passes(0.1)
        assert "kvxfer_router_running 2.0" in await metrics(client)
        read = 0

        async def refused() -> AsyncIterator[bytes]:
            nonlocal read
            read += 1
            yield BODY

        answer = await client.post(COMPLETIONS, content=refused(), headers=JSON)
        error_of(answer, 503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert read == 0
        for request in kept:
            assert (await request.finish()).status_code == 200
        assert "kvxfer_router_running 0.0" in await metrics(client)
        assert (await client.post(COMPLETIONS, content=BODY, headers=JSON)).status_code == 200


async def test_bytes_of_bodies_are_bounded_over_all_requests(network, fleet):
    async with network.routed(max_held_bytes=1000) as client:
        kept = Unfinished(client, 900)
        await passes(0.1)
        error_of(await Unfinished(client, 200).answer, 503, "overloaded")
        assert 'failures_total{code="overloaded"} 1.0' in await metrics(client)
        assert (await kept.finish()).status_code == 200
        assert (await Unfinished(client, 900).finish()).status_code == 200


async def test_client_that_leaves_within_its_body_gives_its_place_back(network, fleet):
    async with network.routed(max_requests=1, max_held_bytes=1000) as client:
        sent = iter(
            [
                {"type": "http.request", "body": b" " * 900, "more_body": True},
                {"type": "http.disconnect"},
            ]
        )

        async def receive() -> Message:
            return next(sent)

        async def send(message: Message) -> None: ...

        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": b"",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(b"content-type", b"application/json")],
            "client": ("h", 1),
        }
        await network.apps["router"](scope, receive, send)
        assert (await Unfinished(client, 900).finish()).status_code == 200
        told = await metrics(client)
        assert "kvxfer_router_aborted_total 1.0" in told
        assert 'requests_total{route="/v1/completions",status="499"} 1.0' in told
