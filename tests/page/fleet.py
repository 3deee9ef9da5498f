"""A real fleet behind the page: control plane with tokens and autoscaler, router, reference
workers in two zones, and requests that keep coming."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from kvxfer.api.tokens import Scope
from kvxfer.http_listener import bind
from verify.polling import wait_until

WORKER, ROUTER, ADMIN, MONITOR = (f"{scope}-token-of-the-tests" for scope in Scope)
TOKENS = f"""\
ops admin {ADMIN}
wall monitor {MONITOR}
node worker {WORKER}
router router {ROUTER}
"""
POLICY = """\
interval: 2
prefill: {max: 4, requests: 4}
decode: {max: 4, requests: 1}
"""
# instance: zone, rack, host, fabrics
WORKERS = {
    "prefill-0": ("eu-1a", "r1", "node-1", "local,tcp"),
    "prefill-1": ("eu-1b", "r7", "node-9", "tcp"),
    "decode-0": ("eu-1a", "r1", "node-2", "local,tcp"),
    "decode-1": ("eu-1a", "r2", "node-4", "local,tcp"),
}
BLOCKS = 256
PROMPT = "The KV cache of this prompt travels from one worker to another. " * 20


class Fleet:
    """Its processes, by name."""

    def __init__(self, folder: Path) -> None:
        self._tokens, self._policy = folder / "tokens", folder / "scaling.yaml"
        self._tokens.write_text(TOKENS)
        self._policy.write_text(POLICY)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KVXFER_")}
        self._environment = {**kept, "KVXFER_CLUSTER_KEY": "0123456789abcdef" * 2}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        with bind("127.0.0.1", 0) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.start_control_plane()
        self.router = str(self._start("router", "router", "--port", "0", token=ROUTER)["url"])

    def start_control_plane(self) -> None:
        """Also again, at the same address."""
        self._start(
            "control plane",
            *("serve", "--port", str(self._port), "--tokens-file", str(self._tokens)),
            *("--scaling-policy", str(self._policy), "--lease-seconds", "9"),
        )

    def start_worker(self, name: str) -> None:
        zone, rack, host, fabrics = WORKERS[name]
        labels = [f"zone={zone}", f"rack={rack}", f"host={host}"]
        self._start(
            name,
            *("worker", "--role", name.partition("-")[0], "--instance-id", name),
            *("--blocks", str(BLOCKS), "--threads", "1", "--fabrics", fabrics),
            *(word for label in labels for word in ("--label", label)),
            token=WORKER,
        )

    def instances(self) -> dict[str, dict[str, Any]]:
        """What the registry holds, by id."""
        answer = httpx.get(
            f"{self.url}/v1/instances", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=20
        )
        return {each["instance_id"]: each for each in answer.json()["instances"]}

    def exit_code(self, name: str, timeout: float) -> int:
        """That of a process which ends by itself."""
        code = self._processes[name].wait(timeout)
        self._processes.pop(name).communicate()
        return code

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.communicate()

    def _start(self, name: str, *arguments: str, token: str = "") -> dict[str, Any]:
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.cli", *arguments, "--json"],
            env={**self._environment, "KVXFER_CONTROL_PLANE": self.url, "KVXFER_TOKEN": token},
            stdout=subprocess.PIPE,
            text=True,
        )
        output = self._processes[name].stdout
        assert output is not None
        line = output.readline()
        # A process that fails says why in several lines.
        assert line.rstrip().endswith("}"), f"{name}: {line}{output.read()}"
        started: dict[str, Any] = json.loads(line)
        return started


class Requests:
    """Keeps some completions under way until the block ends."""

    def __init__(self, router: str, at_once: int = 4) -> None:
        self._router = router
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, daemon=True) for _ in range(at_once)]
        self.answered = 0

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True, "stream": False}
        with httpx.Client(base_url=self._router, timeout=60) as client:
            models = client.get("/v1/models").json()["data"]
            body["model"] = models[0]["id"] if models else ""

            def answered() -> bool:
                # A busy machine answers late, and drained or killed workers not at all.
                with contextlib.suppress(httpx.HTTPError):
                    if client.post("/v1/completions", json=body).is_success:
                        self.answered += 1
                        return True
                return self._stop.is_set()

            while not self._stop.is_set():
                wait_until(answered, 600, pause=0.2)
