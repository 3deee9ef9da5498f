"""The connector with vLLM's own parts and caches in GPU memory: `make test SUITE=vllm-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.on_driver import run_on_driver
from verify.polling import PATIENCE
from verify.processes.control_plane import CLUSTER_KEY, RunningControlPlane
from verify.processes.vllm.servers import VLLM_PYTHON

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]


def test_caches_of_every_backend_arrive_byte_for_byte() -> None:
    run_on_driver("tests.vllm.gpu_layouts", python=VLLM_PYTHON, seconds=20 * PATIENCE)


@pytest.mark.parametrize("layers", ["equal", "whole", "several", "large", "states", "aligned"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_tokens_of_a_pair_are_those_of_one_server(
    runner: str, layers: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", CLUSTER_KEY.decode())
    with RunningControlPlane() as control_plane:
        monkeypatch.setenv("KVXFER_CONTROL_PLANE", control_plane.url)
        run_on_driver("tests.vllm.gpu_pair", str(model), runner, layers, python=VLLM_PYTHON)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_engines_sleep_and_wake_under_load(
    runner: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", CLUSTER_KEY.decode())
    with RunningControlPlane() as control_plane:
        monkeypatch.setenv("KVXFER_CONTROL_PLANE", control_plane.url)
        run_on_driver("tests.vllm.gpu_sleep", str(model), runner, python=VLLM_PYTHON)
