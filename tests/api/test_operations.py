from __future__ import annotations

from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.control_plane import calling
from verify.processes.control_plane import CLUSTER_KEY

from .conftest import problem


async def test_alive_and_ready(api):
    for path in ("/healthz", "/readyz"):
        answer = await api.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_alive_but_not_ready_without_a_registry(api, registry):
    await registry.close()
    assert (await api.get("/healthz")).status_code == 200
    problem(await api.get("/readyz"), 503, "control-plane-unavailable")


async def test_not_ready_while_stopping(clock):
    app = create_app(Settings(cluster_key=CLUSTER_KEY), EmbeddedRegistry(clock=clock), clock=clock)
    app.state.control_plane.stopping.set()
    async with calling(app) as api:
        problem(await api.get("/readyz"), 503, "control-plane-unavailable")
        assert (await api.get("/v1/instances")).status_code == 200
