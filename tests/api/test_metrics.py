from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.virtual_time import passes

from .conftest import LEASE, join


async def scrape(api) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_metrics_follow_the_fleet(api, clock):
    lease = await join(api, "p")
    await join(api, "d", "decode")
    await join(api, "j", "decode", state="joining")
    await api.put("/v1/instances/p/heartbeat", json={"epoch": lease["epoch"]})
    kept = (await api.post("/v1/transfers", json={})).json()
    await api.post("/v1/transfers", json={})
    await api.delete(f"/v1/transfers/{kept['transfer_id']}")

    now = await scrape(api)
    assert now["kvxfer_instances", (("role", "prefill"), ("state", "ready"))] == 1
    assert now["kvxfer_instances", (("role", "decode"), ("state", "joining"))] == 1
    assert now["kvxfer_registrations_total", ()] == 3
    assert now["kvxfer_heartbeats_total", ()] == 1
    assert now["kvxfer_transfers_opened_total", ()] == 2
    assert now["kvxfer_transfers_open", ()] == 1
    assert now["kvxfer_transfers_ended_total", (("reason", "released"),)] == 1
    assert now["kvxfer_transfers_ended_total", (("reason", "instance-gone"),)] == 0

    clock.advance(LEASE)
    later = await scrape(api)
    assert later["kvxfer_leases_expired_total", ()] == 3
    assert later["kvxfer_transfers_ended_total", (("reason", "instance-gone"),)] == 1
    assert not [name for name, _ in later if name == "kvxfer_instances"]
    assert not [name for name, _ in later if name.endswith("_created")], "no second series for each"


async def test_the_time_of_a_request_ends_when_its_answer_begins(api, registry, monkeypatch):
    async def takes_its_time() -> None:
        await passes(0.2)

    monkeypatch.setattr(registry, "ping", takes_its_time)
    await api.get("/readyz")
    now = await scrape(api)
    route = (("method", "GET"), ("route", "/readyz"))
    assert now["kvxfer_http_request_seconds_sum", route] == pytest.approx(0.2)


async def test_requests_are_counted_by_route_not_by_path(api):
    await api.get("/v1/instances/one")
    await api.get("/v1/instances/two")
    for name in ("x", "y", "z"):
        await api.request(name, f"/{name}")
        await api.request(name, "/healthz")
    now = await scrape(api)
    route = ("route", "/v1/instances/{instance_id}")
    counted = {
        labels: n for (name, labels), n in now.items() if name == "kvxfer_http_requests_total"
    }
    assert counted[("method", "GET"), route, ("status", "404")] == 2
    assert counted[("method", "other"), ("route", "unmatched"), ("status", "404")] == 3
    assert counted[("method", "other"), ("route", "/healthz"), ("status", "405")] == 3
    assert len(counted) == 3
    assert now["kvxfer_http_request_seconds_count", (("method", "GET"), route)] == 2
    assert now["kvxfer_http_errors_total", (("code", "unknown-instance"),)] == 2


async def test_applications_do_not_share_their_metrics(api):
    from kvxfer.api.app import create_app
    from kvxfer.api.settings import Settings
    from kvxfer.scheduler.embedded import EmbeddedRegistry
    from verify.processes.control_plane import CLUSTER_KEY

    await api.get("/v1/instances")
    registry = EmbeddedRegistry()
    other = create_app(Settings(cluster_key=CLUSTER_KEY), registry)
    rendered = other.state.control_plane.metrics.render(
        await registry.statistics(), (), None, {}
    ).decode()
    assert "/v1/instances" not in rendered


async def test_load_of_the_fleet_is_what_heartbeats_reported(api):
    prefill = await join(api, "p")
    await join(api, "d", "decode")
    await join(api, "e", "decode")
    load = {"running": 3, "waiting": 2, "free_blocks": 60, "cached_blocks": 7}
    beat = {"epoch": prefill["epoch"], "load": load}
    await api.put("/v1/instances/p/heartbeat", json=beat)
    now = await scrape(api)
    by_role = (("role", "prefill"),)
    assert now["kvxfer_fleet_requests_running", by_role] == 3
    assert now["kvxfer_fleet_requests_waiting", by_role] == 2
    assert now["kvxfer_fleet_kv_blocks", by_role] == 64
    assert now["kvxfer_fleet_kv_used_blocks", by_role] == 4
    assert now["kvxfer_fleet_kv_cached_blocks", by_role] == 7
    assert now["kvxfer_fleet_kv_blocks", (("role", "decode"),)] == 128
