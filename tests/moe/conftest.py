from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

import pytest

from tests.moe.scenario import Scenario
from verify.processes.process import ROOT, Process

_SECONDS: Final = 240.0

WHOLE: Final = "KVXFER_MOE_WHOLE" in os.environ
"""True under `make test SUITE=moe`: more rounds, and more ranks."""

Drive = Callable[..., None]


@pytest.fixture
def drive(seed: int) -> Drive:
    """Runs scenarios, one after the other, in a process of tests.moe.drive."""

    def run(*scenarios: Scenario) -> None:
        print(f"seed {seed}")
        texts = [json.dumps({**asdict(each), "seed": seed + n}) for n, each in enumerate(scenarios)]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "OMP_NUM_THREADS": "1",
        }
        command = (sys.executable, "-m", "tests.moe.drive", *texts)
        with Process("moe ranks", *command, environment=variables) as process:
            process.ends(seconds=_SECONDS)

    return run
