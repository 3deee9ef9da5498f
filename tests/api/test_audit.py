"""Decisions about the fleet leave a log line: the decision, its subject, the caller and address."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from kvxfer.api.app import create_app
from kvxfer.api.audit import note_scaling
from kvxfer.api.settings import Settings
from kvxfer.instances import Role
from kvxfer.logs import AUDIT
from kvxfer.scaling import RoleDecision, ScalePlan
from kvxfer.web.tokens import watch_tokens
from verify.processes.control_plane import CLUSTER_KEY

from .conftest import registration

WORKER = {"Authorization": "Bearer token-of-a-worker"}
OPS = {"Authorization": "Bearer token-of-operators"}
_OWN = {*vars(logging.makeLogRecord({})), "message", "taskName"}


@pytest.fixture
def app(tmp_path: Path, registry, clock) -> FastAPI:
    file = tmp_path / "tokens"
    file.write_text("w1 worker token-of-a-worker\nops admin token-of-operators\n")
    tokens = watch_tokens(file, clock=clock)
    return create_app(Settings(cluster_key=CLUSTER_KEY, tokens=tokens), registry, clock=clock)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Returns the audit lines and their extra members, and clears the log."""
    found = [record for record in caplog.records if record.name == AUDIT]
    caplog.clear()
    return [
        (record.getMessage(), {k: v for k, v in vars(record).items() if k not in _OWN})
        for record in found
    ]


async def test_decisions_of_operators_and_workers(api, caplog):
    caplog.set_level(logging.INFO, logger=AUDIT)
    for name in "pq":
        await api.post("/v1/instances", json=registration(name), headers=WORKER)
    epoch = (await api.get("/v1/instances/p", headers=OPS)).json()["epoch"]
    assert not lines(caplog)
    ops = {"caller": "ops", "address": "127.0.0.1"}

    await api.post("/v1/instances/p/role", json={"role": "decode"}, headers=OPS)
    assert lines(caplog) == [("change role", {**ops, "instance_id": "p", "role": "decode"})]
    await api.post("/v1/instances/p/drain", json={"deadline_seconds": 5}, headers=OPS)
    assert lines(caplog) == [("drain", {**ops, "instance_id": "p", "seconds": 5.0})]
    await api.delete("/v1/instances/p/drain", headers=OPS)
    assert lines(caplog) == [("undo drain", {**ops, "instance_id": "p"})]
    await api.post("/v1/instances/q/drain", headers=WORKER)
    ((_, about),) = lines(caplog)
    assert (about["caller"], about["instance_id"]) == ("w1", "q")
    await api.delete("/v1/instances/p", params={"epoch": epoch}, headers=OPS)
    assert lines(caplog) == [("deregister", {**ops, "instance_id": "p", "epoch": epoch})]


async def test_a_leaving_worker_and_a_refused_call_leave_no_line(api, caplog):
    caplog.set_level(logging.INFO, logger=AUDIT)
    lease = await api.post("/v1/instances", json=registration("p"), headers=WORKER)
    await api.post("/v1/instances/p/role", json={"role": "decode"}, headers=WORKER)
    await api.post("/v1/instances/x/drain", headers=OPS)
    params = {"epoch": lease.json()["epoch"]}
    await api.delete("/v1/instances/p", params=params, headers=WORKER)
    assert not lines(caplog)


async def test_only_the_first_decision_about_weights_leaves_a_line(api, caplog):
    caplog.set_level(logging.INFO, logger=AUDIT)
    identity = {"weights_version": 6}
    body = registration("p") | {"identity": identity}
    answer = await api.post("/v1/instances", json=body, headers=WORKER)
    assert answer.status_code == 201, answer.text
    update = {"update_id": "u", "model": "llama", "version": 7}
    answer = await api.post("/v1/weights/updates", json=update, headers=WORKER)
    assert answer.status_code == 201, answer.text
    for decision in ("abort", "commit"):
        path = "/v1/weights/updates/u/decision"
        await api.post(path, json={"decision": decision}, headers=WORKER)
    ((said, about),) = lines(caplog)
    assert said == "decide weight update"
    assert about == {
        "caller": "w1",
        "address": "127.0.0.1",
        "update_id": "u",
        "model": "llama",
        "version": 7,
        "decision": "abort",
    }


@pytest.mark.parametrize("leads", [True, False])
def test_scaling_by_the_leader_that_changes_something_leaves_a_line(caplog, leads):
    caplog.set_level(logging.INFO, logger=AUDIT)
    note_scaling(
        ScalePlan(
            at=1.0,
            policy="scaling.yaml",
            model=None,
            backend="kubernetes",
            leads=leads,
            observed_seconds=60.0,
            prefill=RoleDecision.of(Role.PREFILL, 2, 2),
            decode=RoleDecision.of(Role.DECODE, 2, 3),
        )
    )
    about = {
        "caller": "autoscaler",
        "policy": "scaling.yaml",
        "backend": "kubernetes",
        "role": "decode",
        "workers": 3,
        "before": 2,
        "because": "nothing is measured",
    }
    assert lines(caplog) == ([("scale", about)] if leads else [])
