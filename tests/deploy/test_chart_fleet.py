"""The chart's fleet as processes of this host: command lines, secrets and hooks as rendered.

Addresses and the folder of secrets are replaced, nothing else. What Kubernetes does when a pod is
replaced (a new pod, preStop, SIGTERM, its exit) is done by hand, while requests go on.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.control_plane import PATIENCE
from tests.deploy.chart import Container, Rendered, render
from tests.deploy.programs import variables
from tests.redis_server import free_port

pytestmark = pytest.mark.skipif(
    not os.environ.get("KVXFER_HELM_TEST"), reason="run by `make helm-test`"
)
START_SECONDS = 8 * PATIENCE


@dataclass
class Pod:
    """The first container of a workload, as a process."""

    release: Rendered
    workload: str
    folder: Path
    name: str
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def container(self) -> Container:
        wanted = f"Deployment {self.workload}"
        [found] = [one for one in self.release.containers() if one.owner == wanted]
        return found

    @property
    def environment(self) -> dict[str, str]:
        given = variables(self.container)
        given |= {"POD_IP": "127.0.0.1", "NODE_NAME": "node", "KVXFER_INSTANCE_ID": self.name}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
        return kept | {name: self.here(value) for name, value in given.items()}

    def here(self, text: str) -> str:
        """A text of the chart with this host's addresses and folder."""
        text = text.replace("/etc/kvxfer", str(self.folder)).replace("$(POD_IP)", "127.0.0.1")
        text = text.replace("$(NODE_NAME)", "node").replace("--host=0.0.0.0", "--host=127.0.0.1")
        for service in self.release.of("Service"):
            text = text.replace(f"//{service['metadata']['name']}:", "//127.0.0.1:")
        return text

    def command(self, words: list[str]) -> list[str]:
        programs = {"kvxfer": ["-m", "kvxfer.cli"], "python3": []}
        return [sys.executable, *programs[words[0]], *map(self.here, words[1:])]

    def mount(self) -> None:
        for volume in self.container.pod["spec"]["volumes"]:
            if "secret" in volume:
                content = self.release.secret(volume["secret"]["secretName"])
                (self.folder / volume["name"]).mkdir(parents=True)
                for item in volume["secret"]["items"]:
                    (self.folder / volume["name"] / item["path"]).write_text(content[item["key"]])

    def start(self) -> Pod:
        self.mount()
        spec = self.container.spec
        words = self.command([*spec["command"], *spec["args"]])
        self.process = subprocess.Popen(words, env=self.environment, text=True)
        return self

    def wait(self) -> None:
        """Until its readiness probe is answered."""
        spec = self.container.spec
        path = spec["readinessProbe"]["httpGet"]["path"]
        url = f"http://127.0.0.1:{spec['ports'][0]['containerPort']}{path}"
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up:
            assert self.process is not None and self.process.poll() is None, f"{self.name} ended"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=2).is_success:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{self.name} does not answer at {url}")

    def hook(self) -> subprocess.CompletedProcess[str]:
        words = self.command(self.container.spec["lifecycle"]["preStop"]["exec"]["command"])
        return subprocess.run(
            words, env=self.environment, text=True, capture_output=True, timeout=120, check=False
        )

    def stop(self) -> int:
        """SIGTERM, and the exit code within the grace period."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(self.container.pod["spec"]["terminationGracePeriodSeconds"])


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: list[Pod] = []
        self.release = _on_free_ports()
        self.add("kvxfer").wait()
        router = self.add("kvxfer-router")
        self.workers = [self.add("kvxfer-prefill"), self.add("kvxfer-decode")]
        for pod in (*self.workers, router):
            pod.wait()
        port = self.release.values["router"]["port"]
        key = self.release.secret("kvxfer")["api-key"]
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=60,
        )

    def add(self, workload: str, *, name: str | None = None, port: int | None = None) -> Pod:
        name = name or f"{workload}-0"
        release = self.release
        if port is not None:
            release = Rendered(
                release.name, release.values, _with_port(release, workload, port), release.notes
            )
        pod = Pod(release, workload, self.folder / name, name)
        self.pods.append(pod.start())
        return pod

    def complete(self, **more: Any) -> httpx.Response:
        body = {"model": "kvxfer-demo-8l", "prompt": "hello", "max_tokens": 16, **more}
        return self.client.post("/v1/completions", json=body)

    def close(self) -> None:
        self.client.close()
        for pod in reversed(self.pods):
            assert pod.process is not None
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait()


def _on_free_ports() -> Rendered:
    port = {name: free_port() for name in ("controlPlane", "router", "prefill", "decode")}
    return render(
        {
            "controlPlane": {"port": port["controlPlane"], "leaseSeconds": 15},
            "router": {"port": port["router"], "firstTokenSeconds": 120},
            "workers": {
                "blocks": 256,
                "drainSeconds": 60,
                "extraArgs": ["--threads=1"],
                "prefill": {"port": port["prefill"]},
                "decode": {"port": port["decode"]},
            },
        }
    )


def _with_port(release: Rendered, workload: str, port: int) -> list[Any]:
    """A second pod of a workload has an address of its own in a cluster; here it has a port."""
    objects = copy.deepcopy(release.objects)
    for one in objects:
        if (one["kind"], one["metadata"]["name"]) == ("Deployment", workload):
            [spec] = one["spec"]["template"]["spec"]["containers"]
            old = spec["ports"][0]["containerPort"]
            spec["ports"][0]["containerPort"] = port
            spec["args"] = [arg.replace(f"--port={old}", f"--port={port}") for arg in spec["args"]]
    return objects


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.mark.timeout(600)
def test_fleet_serves_and_its_own_test_passes(fleet: Fleet) -> None:
    answer = fleet.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16
    assert httpx.get(f"{fleet.client.base_url}/v1/models").status_code == 401
    pod = Pod(fleet.release, "", fleet.folder / "test", "test")
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
def test_worker_is_replaced_and_no_request_is_lost(fleet: Fleet) -> None:
    old = fleet.workers[1]
    new = fleet.add("kvxfer-decode", name="kvxfer-decode-1", port=free_port())
    new.wait()
    answers: list[int] = []
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            answers.append(fleet.complete(max_tokens=32).status_code)

    load = threading.Thread(target=ask, daemon=True)
    load.start()
    try:
        hook = old.hook()
        # The reference worker leaves when it is idle, which may come before the hook sees that.
        assert hook.returncode == 0, hook.stderr
        assert hook.stdout in ("kvxfer-decode-0 is idle\n", "kvxfer-decode-0 has left\n")
        # It has left by then, or is about to: the signal may reach it on its way out.
        assert old.stop() in (0, -signal.SIGTERM)
        before = len(answers)
        give_up = time.monotonic() + PATIENCE
        while len(answers) < before + 3 and time.monotonic() < give_up:
            time.sleep(0.05)
    finally:
        enough.set()
        load.join(60)
    assert set(answers) == {200}
    assert len(answers) >= before + 3


@pytest.mark.timeout(600)
def test_router_that_is_told_to_stop_ends_its_streams(fleet: Fleet) -> None:
    [router] = [pod for pod in fleet.pods if pod.workload == "kvxfer-router"]
    assert router.process is not None
    body = {"model": "kvxfer-demo-8l", "prompt": "hello", "max_tokens": 200, "stream": True}
    with fleet.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        router.process.send_signal(signal.SIGTERM)
        *_, last = (line for line in lines if line)
    assert last == "data: [DONE]"
    assert router.process.wait(PATIENCE) == 0
