from __future__ import annotations

import httpx2
import pytest

from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.errors import ScalingFailed
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.scaling.autoscaler import Autoscaler
from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy
from tests.control_plane import calling
from tests.virtual_time import passes
from verify.processes.control_plane import CLUSTER_KEY

from .conftest import join, problem
from .test_metrics import scrape


async def report(api: httpx2.AsyncClient, lease: dict, **load: float) -> None:
    body = {"epoch": lease["epoch"], "load": load}
    answer = await api.put(f"/v1/instances/{lease['instance_id']}/heartbeat", json=body)
    assert answer.status_code == 200, answer.text


async def test_plan_comes_from_what_workers_report_now(api):
    prefill = await join(api, "p")
    decode = await join(api, "d", "decode")
    calm = (await api.get("/v1/scale/plan")).json()
    assert (calm["policy"], calm["backend"], calm["leads"]) == ("default", "none", False)
    assert (calm["prefill"]["wanted"], calm["decode"]["wanted"]) == (1, 1)

    await report(api, prefill, running=9, waiting=6, free_blocks=64)
    await report(api, decode, running=3, itl_p90=0.2, requests_per_second=2)
    plan = (await api.get("/v1/scale/plan")).json()
    assert (plan["prefill"]["direction"], plan["prefill"]["wanted"]) == ("up", 2)
    assert plan["prefill"]["because"] == (
        "requests: 1.88 workers for 9 requests running and 6 waiting at 8 per worker"
    )
    (latency,) = [d for d in plan["decode"]["demands"] if d["rule"] == "latency"]
    assert latency["workers"] == 2
    assert "breaks its target of 0.05 s" in latency["because"]
    assert plan["decode"]["silent"] == ["rate: tokens_per_second of a worker is not in the policy"]


async def test_measurements_of_a_heartbeat_are_listed_and_checked(api):
    lease = await join(api, "d", "decode")
    await report(api, lease, ttft_p90=0.5, itl_p90=0.02, tokens_per_second=900.5)
    load = (await api.get("/v1/instances/d")).json()["load"]
    assert (load["ttft_p90"], load["itl_p90"], load["tokens_per_second"]) == (0.5, 0.02, 900.5)
    assert load["requests_per_second"] is None
    body = {"epoch": lease["epoch"], "load": {"itl_p90": -1}}
    answer = problem(await api.put("/v1/instances/d/heartbeat", json=body), 422, "invalid-argument")
    assert answer["field"] == "load.itl_p90"


async def test_unavailable_backend_is_a_problem_document(api, monkeypatch):
    async def away(self: Autoscaler) -> None:
        raise ScalingFailed("Kubernetes did not read deployments.apps llm/prefill: HTTP 403")

    monkeypatch.setattr(Autoscaler, "plan", away)
    body = problem(await api.get("/v1/scale/plan"), 502, "scaling-failed")
    assert "llm/prefill" in body["detail"]


async def test_rounds_show_in_the_metrics(clock):
    registry = EmbeddedRegistry(clock=clock)
    policy = ScalingPolicy(interval=60, prefill=RolePolicy(min=2), decode=RolePolicy(min=3))
    autoscaler = Autoscaler(registry, policy, clock=clock)
    app = create_app(
        Settings(cluster_key=CLUSTER_KEY), registry, clock=clock, autoscaler=autoscaler
    )
    async with calling(app) as api:
        await passes(1)
        now = await scrape(api)
        assert now["kvxfer_scale_leader", ()] == 1
        for role, wanted in (("prefill", 2), ("decode", 3)):
            assert now["kvxfer_scale_wanted_workers", (("role", role),)] == wanted
            assert now["kvxfer_scale_current_workers", (("role", role),)] == 0
            labels = (("direction", "up"), ("role", role))
            assert now["kvxfer_scale_decisions_total", labels] == 1
        await passes(120)
        now = await scrape(api)
        assert now["kvxfer_scale_decisions_total", (("direction", "up"), ("role", "decode"))] == 3
        app.state.control_plane.metrics.note_scaling_failure(ScalingFailed("away"))
        app.state.control_plane.metrics.note_scaling_failure(TimeoutError())
        now = await scrape(api)
        assert now["kvxfer_scale_leader", ()] == 0
        for code in ("scaling-failed", "deadline-exceeded"):
            assert now["kvxfer_scale_failures_total", (("code", code),)] == 1


@pytest.mark.parametrize("method", ["post", "put", "delete"])
async def test_plan_can_only_be_read(api, method):
    problem(await getattr(api, method)("/v1/scale/plan"), 405, "method-not-allowed")
