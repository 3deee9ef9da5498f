"""Programs that need a CUDA driver, each in a separate process: that of pytest loads none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from verify.polling import PATIENCE
from verify.processes.process import ROOT, Process

DOUBLE: Final = ROOT / "build/tests/engine_native/cuda_double"


def run_on_driver(
    module: str,
    *arguments: str,
    libraries: Path = DOUBLE,
    python: str = sys.executable,
    seconds: float = 8 * PATIENCE,
) -> None:
    """Runs `python -m MODULE ARGUMENTS...`, which must end with 0 within `seconds`.

    The driver is the one in `libraries`: by default the double, or this machine's driver if
    KVXFER_TEST_CUDA is set. `python` may be that of another environment.
    """
    paths = [str(ROOT)] if python != sys.executable else [str(ROOT), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if libraries != DOUBLE or "KVXFER_TEST_CUDA" not in environment:
        assert (libraries / "libcuda.so.1").exists(), "the double is not built: run make test"
        environment["LD_LIBRARY_PATH"] = str(libraries)
    command = (python, "-m", module, *arguments)
    with Process("program", *command, environment=environment) as program:
        program.ends(seconds)
