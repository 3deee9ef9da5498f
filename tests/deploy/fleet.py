"""The chart's fleet as processes of this host: command lines, secrets and hooks as rendered.

Only addresses and the folder of secrets are replaced. The tests do what Kubernetes does when it
replaces a pod: a new pod, its Service, preStop, SIGTERM, its exit.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.deploy.chart import Container, Rendered, render
from tests.deploy.programs import variables
from verify.polling import wait_until
from verify.processes.balancer import Balancer
from verify.processes.fleet import Fleet
from verify.processes.programs import Server, free_port

_ANSWER_SECONDS = 60.0


@dataclass
class Pod:
    """The first container of a workload, as a process."""

    release: Rendered
    workload: str
    folder: Path
    name: str
    redis_port: int
    server: Server | None = field(default=None, repr=False)

    @property
    def container(self) -> Container:
        wanted = f"Deployment {self.workload}"
        [found] = [one for one in self.release.containers() if one.owner == wanted]
        return found

    @property
    def environment(self) -> dict[str, str]:
        given = variables(self.container)
        given |= {"POD_IP": "127.0.0.1", "NODE_NAME": "node", "KVXFER_INSTANCE_ID": self.name}
        given["KVXFER_RUNTIME_DIR"] = str(self.folder / "runtime")  # each pod has a /tmp
        password = self.release.secret("kvxfer-registry")["password"]
        given |= {name: value.replace("secret@", f"{password}@") for name, value in given.items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
        return kept | {name: self.here(value) for name, value in given.items()}

    def here(self, text: str) -> str:
        """Returns a text of the chart with this host's addresses and folder."""
        text = text.replace("/etc/kvxfer", str(self.folder)).replace("$(POD_IP)", "127.0.0.1")
        text = text.replace("$(NODE_NAME)", "node").replace("--host=::", "--host=127.0.0.1")
        text = text.replace("@kvxfer-registry:6379", f"@127.0.0.1:{self.redis_port}")
        for service in self.release.of("Service"):
            text = text.replace(f"//{service['metadata']['name']}:", "//127.0.0.1:")
        return text

    def command(self, words: list[str]) -> list[str]:
        programs = {"kvxfer": [sys.executable, "-m", "kvxfer.cli"], "python3": [sys.executable]}
        return [*programs.get(words[0], words[:1]), *map(self.here, words[1:])]

    def mount(self) -> None:
        for volume in self.container.pod["spec"].get("volumes", []):
            if "secret" in volume:
                content = self.release.secret(volume["secret"]["secretName"])
                (self.folder / volume["name"]).mkdir(parents=True)
                for item in volume["secret"]["items"]:
                    (self.folder / volume["name"] / item["path"]).write_text(content[item["key"]])

    def start(self) -> Pod:
        self.mount()
        spec = self.container.spec
        [port, *_] = spec["ports"]
        self.server = Server(
            *(self.name, *self.command([*spec["command"], *spec["args"]])),
            url=f"http://127.0.0.1:{port['containerPort']}",
            folder=self.folder,
            environment=self.environment,
        )
        return self

    @property
    def started(self) -> Server:
        assert self.server is not None
        return self.server

    def wait(self) -> None:
        """Waits until the readiness probe is answered."""
        self.started.serves(self.container.spec["readinessProbe"]["httpGet"]["path"])

    def hook(self) -> subprocess.CompletedProcess[str]:
        words = self.command(self.container.spec["lifecycle"]["preStop"]["exec"]["command"])
        return subprocess.run(
            words, env=self.environment, text=True, capture_output=True, timeout=120, check=False
        )

    def stop(self) -> None:
        """Sends SIGTERM and waits for exit code 0 within the grace period."""
        seconds = self.container.pod["spec"]["terminationGracePeriodSeconds"]
        self.started.stop(seconds=seconds)


class Deployed(Fleet):
    """The pods of a release."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pods: dict[str, Pod] = {}
        self.release = _on_free_ports()
        self.redis_port = free_port()
        self.deploy("kvxfer-registry", port=self.redis_port)
        self.service = Balancer(port=self.release.values["controlPlane"]["port"])
        self.control_plane = self.add_control_plane("kvxfer-0")
        others = ("kvxfer-router", "kvxfer-prefill", "kvxfer-decode")
        for pod in [self.deploy(name) for name in others]:
            pod.wait()
        port = self.release.values["router"]["port"]
        key = self.release.secret("kvxfer")["api-key"]
        self.caller = httpx2.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=_ANSWER_SECONDS,
        )

    def add_control_plane(self, name: str) -> Pod:
        port = free_port()
        pod = self.deploy("kvxfer", name=name, port=port)
        pod.wait()
        self.service.ports.append(port)
        return pod

    def deploy(self, workload: str, *, name: str | None = None, port: int | None = None) -> Pod:
        name = name or f"{workload}-0"
        release = self.release
        if port is not None:
            release = Rendered(
                release.name, release.values, _with_port(release, workload, port), release.notes
            )
        pod = Pod(release, workload, self.folder / name, name, self.redis_port).start()
        self.pods[name] = pod
        self.add(pod.started)
        return pod

    def complete(self, **more: Any) -> httpx2.Response:
        body = {"model": "kvxfer-demo-8l", "prompt": "hello", "max_tokens": 16, **more}
        return self.caller.post("/v1/completions", json=body)

    @contextlib.contextmanager
    def under_load(self, **more: Any) -> Iterator[list[int]]:
        """Sends one request after another and yields their status codes; at least three of the
        requests are answered after the block's end."""
        answers: list[int] = []
        enough = threading.Event()

        def ask() -> None:
            while not enough.is_set():
                answers.append(self.complete(**more).status_code)

        load = threading.Thread(target=ask, daemon=True)
        load.start()
        try:
            yield answers
            before = len(answers)
            wait_until(lambda: len(answers) >= before + 3, _ANSWER_SECONDS)
        finally:
            enough.set()
            load.join()

    def close(self) -> None:
        self.caller.close()
        self.service.close()
        super().close()


def _on_free_ports() -> Rendered:
    port = {name: free_port() for name in ("controlPlane", "router", "prefill", "decode")}
    return render(
        {
            "registry": {"kind": "bundled"},
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
    """Returns the objects with `port` for a workload: its pods share the address of this host."""
    objects = copy.deepcopy(release.objects)
    for one in objects:
        if (one["kind"], one["metadata"]["name"]) == ("Deployment", workload):
            [spec] = one["spec"]["template"]["spec"]["containers"]
            old = spec["ports"][0]["containerPort"]
            spec["ports"][0]["containerPort"] = port
            spec["args"] = [arg.replace(f"--port={old}", f"--port={port}") for arg in spec["args"]]
            if workload == "kvxfer-registry":
                spec["args"] += ["--port", str(port)]
    return objects
