"""SGLang's own pools of models that a CPU cannot run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verify.polling import PATIENCE
from verify.processes.process import ROOT, Process

from .conftest import SGLANG_PYTHON

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", ["windows", "mamba", "sparse"])
def test_pools_move_byte_by_byte(kind: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = (SGLANG_PYTHON, "-m", "tests.sglang.pool_classes", kind)
    with Process("pools", *command, folder=tmp_path, environment=environment) as program:
        program.ends(8 * PATIENCE)
