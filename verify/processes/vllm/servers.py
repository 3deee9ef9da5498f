"""The servers of a disaggregated vLLM. A fleet starts them beside its control plane and router."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx2

from verify.processes.fleet import Fleet
from verify.processes.programs import Server, free_port

VLLM_PYTHON: Final = os.environ.get("KVXFER_VLLM_PYTHON", "")
_STOP_SECONDS: Final = 20.0
_QUIET: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def make_model(folder: Path, *sizes: str) -> Path:
    """Makes the checkpoint of the tiny Llama in a folder; `sizes` are options of tiny_llama.py."""
    if not VLLM_PYTHON:
        raise SystemExit("set KVXFER_VLLM_PYTHON to a Python with vLLM: $(scripts/vllm-python)")
    made = folder / "tiny"
    maker = Path(__file__).with_name("tiny_llama.py")
    subprocess.run([VLLM_PYTHON, str(maker), str(made), *sizes], check=True)
    return made


def vllm(
    name: str,
    folder: Path,
    model: Path,
    *arguments: str,
    transfer: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Server:
    """Starts an OpenAI server of vLLM; with `transfer` it is one side of a disaggregated pair."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"]
    command += ["--dtype", "float32", "--kv-cache-memory-bytes", str(128 << 20), *arguments]
    if transfer is not None:
        config = {
            **transfer,
            "kv_connector_extra_config": {
                "instance_id": name,
                "http_address": url,
                **transfer.get("kv_connector_extra_config", {}),
            },
        }
        command += ["--kv-transfer-config", json.dumps(config)]
    environment = {**os.environ, **(variables or {}), **_QUIET}
    return Server(
        name, *command, url=url, folder=folder, environment=environment, grace=_STOP_SECONDS
    )


def add_vllm(
    fleet: Fleet,
    name: str,
    model: Path,
    *arguments: str,
    role: str = "kv_both",
    policy: str = "fail",
    connector: str = "KvxferConnector",
    module: str = "kvxfer.connectors.vllm.connector",
    variables: Mapping[str, str] | None = None,
    **settings: Any,
) -> Server:
    """Starts a vLLM as a worker of a fleet; `settings` are its connector's."""
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"control_plane": fleet.url, **settings},
    }
    environment = {**fleet.variables, **(variables or {})}
    server = vllm(name, fleet.folder, model, *arguments, transfer=transfer, variables=environment)
    return fleet.add(server, works=True)


def references(
    folder: Path, model: Path, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Returns the tokens after each prompt, from one server without a connector."""

    def tokens(server: Server, prompt: Sequence[int]) -> list[int]:
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = httpx2.post(server.url + "/v1/completions", json=body, timeout=90.0)
        [choice] = answer.raise_for_status().json()["choices"]
        return list(choice["token_ids"])

    with vllm("aggregated", folder, model) as server, ThreadPoolExecutor(8) as threads:
        server.serves("/health")
        return list(threads.map(lambda prompt: tokens(server, prompt), prompts))
