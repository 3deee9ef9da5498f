from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec import json

from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.registry import LeasePolicy
from tests.control_plane import CLUSTER_KEY, worker
from tests.virtual_time import VirtualClock

LEASE = 6.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def registry(clock: VirtualClock) -> EmbeddedRegistry:
    return EmbeddedRegistry(LeasePolicy(LEASE), clock=clock)


@pytest.fixture
async def api(registry: EmbeddedRegistry, clock: VirtualClock) -> AsyncIterator[httpx.AsyncClient]:
    """The routes, called without a network."""
    app = create_app(
        Settings(cluster_key=CLUSTER_KEY, transfer_seconds=30, retry_after_seconds=2),
        registry,
        clock=clock,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvxfer") as client:
        yield client


def registration(instance_id: str, role: str = "prefill", **changes: Any) -> dict[str, Any]:
    """The body that registers a worker, ready unless it is changed."""
    state = changes.pop("state", "ready")
    incarnation = changes.pop("incarnation", "")
    body = json.decode(json.encode(worker(instance_id, role, **changes)))
    return {**body, "state": state, "incarnation": incarnation}


async def join(api: httpx.AsyncClient, instance_id: str, role: str = "prefill", **changes: Any):
    answer = await api.post("/v1/instances", json=registration(instance_id, role, **changes))
    assert answer.status_code == 201, answer.text
    return answer.json()


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document of an answer, after checking what each of them has in common."""
    body: dict[str, Any] = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, body["status"], body["code"]) == (status, status, code)
    assert body["type"] == f"urn:kvxfer:error:{code}"
    assert body["instance"] == answer.request.url.path
    assert body["title"]
    assert body["detail"]
    return body
