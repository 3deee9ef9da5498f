"""The chart's fleet serves, and loses no request when its parts are replaced."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import httpx2
import pytest

from tests.deploy.fleet import Deployed, Pod
from tests.deploy.programs import variables
from verify.processes.programs import free_port

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not os.environ.get("KVXFER_HELM_TEST"), reason="make test SUITE=helm"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with Deployed(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.mark.timeout(600)
def test_fleet_serves_and_its_own_test_passes(fleet: Deployed) -> None:
    answer = fleet.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16
    assert httpx2.get(f"{fleet.caller.base_url}/v1/models").status_code == 401
    pod = Pod(fleet.release, "", fleet.folder / "test", "test", fleet.redis_port)
    for container in fleet.release.containers():
        if container.owner == "Pod kvxfer-test":
            given = variables(container) | {"KVXFER_TOKEN_FILE": str(fleet.folder / "token")}
            (fleet.folder / "token").write_text(fleet.release.secret("kvxfer")["router-token"])
            words = pod.command([*container.spec["command"], *container.arguments])
            given["COLUMNS"] = "200"
            environment = os.environ | {name: pod.here(value) for name, value in given.items()}
            ended = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert ended.returncode == 0, ended.stderr
            if container.spec["command"][0] == "kvxfer":
                assert "kvxfer-decode-0" in ended.stdout


@pytest.mark.timeout(600)
def test_worker_is_replaced_and_no_request_is_lost(fleet: Deployed) -> None:
    old = fleet.pods["kvxfer-decode-0"]
    new = fleet.deploy("kvxfer-decode", name="kvxfer-decode-1", port=free_port())
    new.wait()
    with fleet.under_load(max_tokens=32) as answers:
        hook = old.hook()
        # The reference worker leaves when it is idle, maybe before the hook sees it idle.
        assert hook.returncode == 0, hook.stderr
        assert hook.stdout in ("kvxfer-decode-0 is idle\n", "kvxfer-decode-0 has left\n")
        # The worker has left or is leaving, so the signal may reach it while it exits.
        old.stop()
    assert set(answers) == {200}


@pytest.mark.timeout(600)
def test_control_planes_serve_side_by_side_while_one_replaces_the_other(fleet: Deployed) -> None:
    old = fleet.control_plane
    with fleet.under_load() as answers:
        fleet.add_control_plane("kvxfer-1")
        # Kubernetes removes a pod from its Service when it calls preStop.
        fleet.service.ports.pop(0)
        assert old.hook().returncode == 0
        old.stop()
    assert set(answers) == {200}


@pytest.mark.timeout(600)
def test_router_that_is_told_to_stop_ends_its_streams(fleet: Deployed) -> None:
    router = fleet.pods["kvxfer-router-0"].started
    body = {"model": "kvxfer-demo-8l", "prompt": "hello", "max_tokens": 200, "stream": True}
    with fleet.caller.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        router.send(signal.SIGTERM)
        *_, last = (line for line in lines if line)
    assert last == "data: [DONE]"
    router.ends()
