"""GPU memory, on the double of a CUDA driver or on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.on_driver import run_on_driver
from tests.engine import gpu_memory, gpu_transfers

FABRICS = ("tcp", "local")
ENDED = {"killed", "frozen"}


@pytest.mark.native
@pytest.mark.parametrize("case", gpu_memory.CASES)
def test_memory_of_a_gpu_is_registered(case: str) -> None:
    run_on_driver(gpu_memory.__name__, case)


@pytest.mark.native
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("case", sorted(gpu_transfers.CASES.keys() - ENDED))
def test_memory_of_a_gpu_is_written(case: str, fabric: str) -> None:
    run_on_driver(gpu_transfers.__name__, case, fabric)


@pytest.mark.realtime
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("how", sorted(ENDED))
def test_a_process_that_ends_leaves_memory_of_a_gpu_usable(how: str, fabric: str) -> None:
    run_on_driver(gpu_transfers.__name__, how, fabric)


@pytest.mark.native
def test_without_a_driver_there_is_host_memory_only(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    run_on_driver(gpu_memory.__name__, "without_driver", libraries=tmp_path)
