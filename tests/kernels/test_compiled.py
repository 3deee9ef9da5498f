"""The kernels as machine code for the GPUs of data centres, made without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.native
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_they_compile_and_copy_16_bytes_at_once(arch: int, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiled", str(arch)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    accesses = json.loads(ran.stdout)
    for kernel in ("pages", "vectors"):
        assert {"ld.global.v2.b64", "st.global.v2.b64"} <= set(accesses[kernel]), accesses
