from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from msgspec import json

from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.errors import by_code
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.registry import Registry
from tests.control_plane import calling
from tests.virtual_time import VirtualClock
from verify.polling import PATIENCE
from verify.processes.control_plane import CLUSTER_KEY, worker

LEASE = 6.0


@pytest.fixture
def registry(clock: VirtualClock) -> EmbeddedRegistry:
    return EmbeddedRegistry(LeasePolicy(LEASE), clock=clock)


@pytest.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.native)])
async def either_registry(request: pytest.FixtureRequest, clock: VirtualClock) -> Registry:
    """Each implementation in turn; the one in Redis uses the clock of the test."""
    if request.param == "embedded":
        return EmbeddedRegistry(LeasePolicy(LEASE), clock=clock)
    url = request.getfixturevalue("empty_redis").url
    return RedisRegistry(url, LeasePolicy(LEASE), clock=clock, timeout=PATIENCE)


@pytest.fixture
def app(registry: Registry, clock: VirtualClock) -> FastAPI:
    return create_app(
        Settings(cluster_key=CLUSTER_KEY, transfer_seconds=30),
        registry,
        clock=clock,
    )


@pytest.fixture
async def api(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a running control plane, without a network."""
    async with calling(app) as client:
        yield client


def registration(instance_id: str, role: str = "prefill", **changes: Any) -> dict[str, Any]:
    """Returns the body that registers a worker, ready by default."""
    state = changes.pop("state", "ready")
    incarnation = changes.pop("incarnation", "")
    body = json.decode(json.encode(worker(instance_id, role, **changes)))
    return {**body, "state": state, "incarnation": incarnation}


async def join(api: httpx2.AsyncClient, instance_id: str, role: str = "prefill", **changes: Any):
    answer = await api.post("/v1/instances", json=registration(instance_id, role, **changes))
    assert answer.status_code == 201, answer.text
    return answer.json()


MEMBERS = ("type", "title", "status", "detail", "code", "instance", "request_id")


def problem(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Returns the problem document of an answer, and checks the members that all have."""
    body: dict[str, Any] = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, body["status"], body["code"]) == (status, status, code)
    assert body["type"] == f"urn:kvxfer:error:{code}"
    assert body["instance"] == answer.request.url.path
    assert body["title"]
    assert body["detail"]
    assert body.keys() <= {*MEMBERS, *by_code(code).members}
    return body
