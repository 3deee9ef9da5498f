"""The connector's assumptions about vLLM's own parts, tried in its environment: the order within a
head that its kernels write, the blocks that its allocator keeps of a window, how ranks share a
recurrent state, how it allocates a cache, and how its queue signals messages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from verify.processes.vllm.servers import VLLM_PYTHON

from .conftest import checkpoint

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        ("packing_probe.py", "vec vec16 80"),
        ("window_probe.py", "windows of 120 prompts"),
        ("state_probe.py", "states of 6 kinds"),
        ("queue_probe.py", "told of 200 messages"),
        ("cache_probe.py", "a cache of 3 layers is shared"),
    ],
)
def test_vllm_works_as_the_connector_assumes(probe: str, says: str) -> None:
    assert says in printed(probe)


def test_a_server_that_returns_routed_experts_does_not_start(folder: Path) -> None:
    assert "are refused" in printed("experts_probe.py", str(checkpoint("experts", folder)))


def test_data_parallel_engines_are_taken_only_if_each_has_its_own_api(
    folder: Path, model: Path
) -> None:
    assert (
        "one taken, dense refused, experts 0 refused, experts 1 refused, hybrid refused, "
        "external taken"
    ) in printed("ranks_probe.py", str(model), str(checkpoint("experts", folder)))


def printed(probe: str, *arguments: str) -> str:
    done = subprocess.run(
        [VLLM_PYTHON, str(Path(__file__).parent / probe), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
