"""The tables of kvxfer.weights.vllm_quantization describe what the installed vLLM does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvxfer.weights import vllm_quantization
from verify.processes.vllm.servers import VLLM_PYTHON

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
RECORDED = {
    "vllm_layers.json": Path(vllm_quantization.__file__).with_name("vllm_layers.json"),
    "vllm_ignored.json": HERE.parent / "weights/vllm_ignored.json",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the probe has written to."""
    folder = tmp_path_factory.mktemp("scales")
    done = subprocess.run(
        [VLLM_PYTHON, str(HERE / "scales_probe.py"), str(folder)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", RECORDED)
def test_the_record_is_what_vllm_does(found: Path, name: str) -> None:
    """If this fails, replace the old files with the new ones, and read what has changed."""
    assert json.loads((found / name).read_text()) == json.loads(RECORDED[name].read_text())
