from __future__ import annotations

import re

import pytest

from tests.examples.programs import run_example

pytestmark = pytest.mark.native


def test_latency_of_engines_that_are_polled() -> None:
    local, tcp = run_example("latency.py", "20")
    assert re.fullmatch(r"local +[\d.]+ us", local)
    assert re.fullmatch(r"tcp +[\d.]+ us", tcp)
