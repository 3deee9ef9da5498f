"""A disaggregated pair with the real SGLang, and a server that is neither side."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from verify.processes.fleet import Fleet
from verify.processes.programs import Server, free_port
from verify.processes.vllm import tiny_llama

HERE = Path(__file__).parent
SGLANG_PYTHON = os.environ.get("KVXFER_SGLANG_PYTHON", "")


def wait_for(server: Server, text: str) -> None:
    """Returns when the server has logged the text."""
    server.ready(lambda: text in server.output, 60)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not SGLANG_PYTHON:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="run by `make test SUITE=sglang`"))


@dataclass
class Side:
    """A server that can be restarted at its port."""

    name: str
    model: Path
    folder: Path
    variables: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Server:
        command = [SGLANG_PYTHON, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--dtype", "bfloat16"]
        command += ["--page-size", "16", "--max-total-tokens", "16384"]
        command += ["--max-running-requests", "16", "--chunked-prefill-size", "512"]
        command += ["--skip-server-warmup", "--disable-overlap-schedule", *self.arguments]
        variables = {
            "KVXFER_PEER_TIMEOUT": "5",  # the cores of a test machine are busy
            "KVXFER_LEASE_SECONDS": "20",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return Server(
            *(self.name, *command),
            url=self.url,
            folder=self.folder,
            environment={**os.environ, **variables, **self.variables},
            grace=20.0,
        )

    def generate(self, prompt: list[int], **more: Any) -> httpx2.Response:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **more}
        return httpx2.post(self.url + "/generate", json=body, timeout=90.0)


@dataclass
class Pair:
    """A pair that is also in a fleet. `ask` sends a request to both sides at once, with a room, as
    SGLang's router does."""

    prefill: Side
    decode: Side
    aggregated: Side
    bootstrap_port: int
    servers: dict[str, Server]
    fleet: Fleet

    def ask(
        self, prompt: list[int], *, room: int | None = None, to_decode: list[int] | None = None
    ) -> tuple[httpx2.Response, httpx2.Response]:
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.SystemRandom().getrandbits(62) if room is None else room,
        }
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            first = threads.submit(self.prefill.generate, prompt, **meeting)
            second = threads.submit(self.decode.generate, to_decode or prompt, **meeting)
            return first.result(), second.result()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("sglang")
    model = folder / "tiny"
    subprocess.run([SGLANG_PYTHON, tiny_llama.__file__, str(model)], check=True)
    with running_pair(folder, model) as servers:
        yield servers


@pytest.fixture(scope="module")
def window_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair with a model whose layers with a sliding window have a separate pool."""
    folder = tmp_path_factory.mktemp("windows")
    model = folder / "tiny"
    maker = Path(tiny_llama.__file__).with_name("tiny_models.py")
    subprocess.run([SGLANG_PYTHON, str(maker), "pools", str(model)], check=True)
    with running_pair(folder, model) as servers:
        yield servers


@contextlib.contextmanager
def running_pair(folder: Path, model: Path) -> Iterator[Pair]:
    port = free_port()
    fleet = Fleet(folder)
    variables = {**fleet.variables, "KVXFER_CONTROL_PLANE": fleet.url}
    backend = ("--disaggregation-transfer-backend", "kvxfer", "--disaggregation-mode")
    prefill = Side(
        "prefill",
        model,
        folder,
        variables,
        (*backend, "prefill", "--disaggregation-bootstrap-port", str(port)),
    )
    # Retracted requests are kept there; the default takes gigabytes of host memory.
    retraction = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    decode = Side("decode", model, folder, variables, (*backend, "decode", *retraction))
    aggregated = Side("aggregated", model, folder, {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(fleet)
        fleet.start_control_plane()
        fleet.start_router()
        servers: dict[str, Server] = {}
        for side in (prefill, decode, aggregated):
            servers[side.name] = stack.enter_context(side.start())
            servers[side.name].serves(
                "/health"
            )  # one at a time: each needs a minute of a core to start
        yield Pair(prefill, decode, aggregated, port, servers, fleet)
