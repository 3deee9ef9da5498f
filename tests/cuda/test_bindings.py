"""The double of a CUDA driver under a client that was not written for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cuda.bindings import CASES

pytestmark = pytest.mark.native

ROOT: Final = Path(__file__).parents[2]
DOUBLE: Final = ROOT / "build/tests/engine_native/cuda_double"


@pytest.mark.parametrize("case", CASES)
def test_nvidias_bindings_work_on_the_double(case: str) -> None:
    assert (DOUBLE / "libcuda.so.1").exists(), "the double is not built: run make test"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.cuda.bindings", case],
        env={**os.environ, "LD_LIBRARY_PATH": str(DOUBLE)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
