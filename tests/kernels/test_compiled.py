"""Compiles the kernels to machine code for data-centre GPUs, on a host without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "engine_native/src/cuda/kernels.hpp"


@pytest.mark.native
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_and_copy_16_bytes_at_once(arch: int, tmp_path: Path) -> None:
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
    of_heads = {kernel for kernel in accesses if kernel.startswith(("attention", "store"))}
    assert len(of_heads) == 6
    for kernel in of_heads:
        assert {"ld.global.v4.b32", "st.global.v4.b32"} <= set(accesses[kernel]), accesses
        # Copies of K and V to shared memory are pipelined; `cg` copies exactly 16 bytes.
        assert ("cp.async.cg" in accesses[kernel]) == kernel.startswith("attention"), accesses


@pytest.mark.native
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_of_the_engine_assemble(arch: int, tmp_path: Path) -> None:
    """The driver compiles their PTX, which is text in C++. Triton includes NVIDIA's assembler."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    folder = Path(str(triton.origin)).parent / "backends/nvidia/bin"
    assembler = folder / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    ptx = KERNELS.read_text().split('R"(')[1].split(')"')[0]
    (tmp_path / "kernels.ptx").write_text(ptx)
    out = tmp_path / "kernels.cubin"
    ran = subprocess.run(
        [assembler, f"-arch=sm_{arch}", tmp_path / "kernels.ptx", "-o", out, "-v"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for kernel in ("kvxfer_copy_pages", "kvxfer_count"):
        assert f"Compiling entry function '{kernel}'" in ran.stderr
