"""The command lines that the Helm chart gives to vLLM, by vLLM's own parser."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.chart import VALUE_SETS, render, value_set
from tests.deploy.programs import expanded
from verify.vllm.servers import VLLM_PYTHON

SETS = {path.stem: path for path in VALUE_SETS}


@pytest.mark.native
@pytest.mark.timeout(300)
def test_vllm_takes_its_options() -> None:
    lines = [
        json.dumps(expanded(container, container.arguments))
        for name in ("vllm", "leaderworkerset")
        for container in render(value_set(SETS[name])).containers()
        if container.spec["name"] == "vllm"
    ]
    done = subprocess.run(
        [VLLM_PYTHON, str(Path(__file__).parent / "chart_probe.py")],
        input="\n".join(lines),
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "kv_producer 8100 300 1 False",
        "kv_consumer 8100 300 1 False",
        "kv_producer 8100 120 2 False",
        "kv_producer 8100 120 2 True",
        "kv_consumer 8100 120 2 False",
        "kv_consumer 8100 120 2 True",
    ]
