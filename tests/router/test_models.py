"""The router's view of a fleet's models: one query a second, whatever clients ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from kvxfer.instances import Load, Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import Network
from tests.virtual_time import passes

from .test_api import DECODES, PREFILLS

ASKED = {"prompt": [1, 2, 3], "max_tokens": 4}


@pytest.fixture
async def control_plane(network: Network):
    async with network.control_plane(lease_seconds=600) as registry:
        for name, role, answer in (("p", Role.PREFILL, PREFILLS), ("d", Role.DECODE, DECODES)):
            await network.join(name, role, answer)
        yield registry


@contextmanager
def listings(network: Network) -> Iterator[list[int]]:
    """Collects the status of each answer of the control plane to GET /v1/instances."""
    told: list[int] = []
    app = network.apps["control-plane"]

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Any) -> None:
            listed = (scope["method"], scope["path"]) == ("GET", "/v1/instances")
            if listed and message["type"] == "http.response.start":
                told.append(message["status"])
            await send(message)

        await app(scope, receive, note)

    network.apps["control-plane"] = noting
    yield told
    network.apps["control-plane"] = app


async def test_many_clients_ask_for_the_models_with_one_question(network, control_plane):
    with listings(network) as told:
        async with network.routed() as client:
            answers = await asyncio.gather(*(client.get("/v1/models") for _ in range(50)))
            assert {answer.status_code for answer in answers} == {200}
            assert told == [200]
            await passes(1.1)
            await client.get("/v1/models")
            assert told == [200, 304]


async def test_workers_describe_their_models_once_a_second(network, control_plane):
    asked = 0

    async def describes(body: dict[str, Any], reply: Any) -> None:
        nonlocal asked
        asked += 1
        await reply.begin(404, "text/plain")
        await reply.end()

    await network.join("a", Role.PREFILL, PREFILLS, others={"/v1/models": describes})
    async with network.routed() as client:
        await asyncio.gather(*(client.get("/v1/models") for _ in range(20)))
        await client.get("/v1/models/none")
        assert asked == 1
        await passes(1.1)
        await client.get("/v1/models")
        assert asked == 2


async def test_invented_models_cost_one_question_and_are_not_remembered(network, control_plane):
    with listings(network) as told:
        async with network.routed() as client:
            for number in range(100):
                body = {**ASKED, "model": f"made-up-{number}"}
                assert (await client.post("/v1/completions", json=body)).status_code == 404
            assert told.count(200) == 1
            models = network.apps["router"].state.router.models
            assert {*models._seen} == {"llama"}


async def test_adapters_that_come_and_go_are_not_remembered_for_ever(network, control_plane):
    registry: EmbeddedRegistry = control_plane
    epoch = (await registry.instance("p")).epoch
    async with network.routed() as client:
        models = network.apps["router"].state.router.models
        for generation in range(9):
            names = tuple(f"lora-{generation}-{number}" for number in range(1000))
            await registry.heartbeat("p", epoch, load=Load(models=names))
            listed = (await client.get("/v1/models")).json()["data"]
            assert {*names} < {card["id"] for card in listed}
            await passes(1.1)
        assert len(models._seen) == 4096
        # A model of a moment ago may come back with its worker.
        await registry.heartbeat("p", epoch, load=Load(models=("new",)))
        gone = await client.post("/v1/completions", json={**ASKED, "model": "lora-8-7"})
        assert gone.status_code == 503
