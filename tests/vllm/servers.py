"""The processes of a disaggregated cluster with vLLM, each with its log in a file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from verify.polling import wait_until

CLUSTER_KEY = "0123456789abcdef0123456789abcdef"
VLLM_PYTHON = os.environ.get("KVXFER_VLLM_PYTHON", "")
_START_SECONDS = 480.0
_STOP_SECONDS = 20.0
# One for all: making one takes tens of milliseconds, for the certificates that nobody needs here.
_http = httpx.Client(trust_env=False)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Server:
    """A process in a group of its own, and where its API answers."""

    name: str
    url: str
    log: Path
    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """The first time, or again after kill()."""
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                self.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Not a session each, which Linux would schedule as a group (sched_autogroup):
                # servers that spin keep the others from the cores for 15 s and more then.
                process_group=0,
                env={**os.environ, "KVXFER_CLUSTER_KEY": CLUSTER_KEY, **self.environment},
            )

    def wait(self, path: str = "/health") -> None:
        """Returns when the API answers."""

        def answers() -> bool:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.tail()}"
            with contextlib.suppress(httpx.HTTPError):
                return _http.get(self.url + path, timeout=2.0).is_success
            return False

        try:
            wait_until(answers, _START_SECONDS, pause=0.2)
        except TimeoutError as error:
            error.add_note(f"{self.name} did not start:\n{self.tail()}")
            raise

    def tail(self, size: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def kill(self) -> None:
        """kill -9, with all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            wait_until(lambda: self.process.poll() is not None, _STOP_SECONDS)
        except TimeoutError:
            self.kill()
        # What its children have left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its labels; with `labels`, over those that have them, if any."""
        text = _http.get(self.url + "/metrics", timeout=30.0).text
        found = re.findall(rf"^{re.escape(name)}({{.*}})? (\S+)$", text, re.MULTILINE)
        assert found or labels, f"{self.name} has no metric {name}"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for has, value in found if all(each in has for each in wanted))


@contextlib.contextmanager
def serving(
    name: str, command: list[str], url: str, folder: Path, **environment: str
) -> Iterator[Server]:
    server = Server(name, url, folder / f"{name}.log", command, environment)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def kvxfer(name: str, folder: Path, *arguments: str) -> contextlib.AbstractContextManager[Server]:
    """`kvxfer serve` or `kvxfer router`."""
    return kvxfer_at(name, folder, free_port(), *arguments)


def kvxfer_at(
    name: str, folder: Path, port: int, *arguments: str
) -> contextlib.AbstractContextManager[Server]:
    command = [sys.executable, "-m", "kvxfer.cli", *arguments, "--port", str(port)]
    return serving(name, command, f"http://127.0.0.1:{port}", folder)


def make_model(folder: Path, *sizes: str) -> Path:
    """The checkpoint of the tiny Llama, made in a folder; `sizes` are options of tiny_llama.py."""
    made = folder / "tiny"
    maker = Path(__file__).parent / "tiny_llama.py"
    subprocess.run([VLLM_PYTHON, str(maker), str(made), *sizes], check=True)
    return made


def vllm(
    name: str,
    folder: Path,
    model: Path,
    *arguments: str,
    transfer: dict[str, Any] | None = None,
) -> contextlib.AbstractContextManager[Server]:
    """An OpenAI server of vLLM; with `transfer` it is one side of a disaggregated pair."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"]
    command += ["--dtype", "float32", "--kv-cache-memory-bytes", str(128 << 20), *arguments]
    if transfer is not None:
        extra = {"instance_id": name, "http_address": url}
        extra.update(transfer.pop("kv_connector_extra_config", {}))
        config = {
            "kv_connector": "KvxferConnector",
            "kv_connector_module_path": "kvxfer.connectors.vllm.connector",
            **transfer,
            "kv_connector_extra_config": extra,
        }
        command += ["--kv-transfer-config", json.dumps(config)]
    return serving(
        name,
        command,
        url,
        folder,
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
    )
