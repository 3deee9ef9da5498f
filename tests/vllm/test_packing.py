"""The orders within a head that packing.py knows are those of vLLM's kernels."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .servers import VLLM_PYTHON

pytestmark = pytest.mark.timeout(300)


def test_kernels_put_tokens_where_the_packing_says() -> None:
    done = subprocess.run(
        [VLLM_PYTHON, str(Path(__file__).parent / "packing_probe.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "vec vec16 80" in done.stdout
