from __future__ import annotations

import re

import pytest

from tests.examples.programs import run_example

pytestmark = pytest.mark.native


def test_a_fleet_is_asked_and_a_worker_drained_meanwhile() -> None:
    asked, *before, drained, decode, prefill = run_example("operations.py", "6")
    assert asked == "6 requests at once: 48 tokens"
    worker = r"(\S+) +ready +running \d+, free \d+ of 128 blocks"
    named = [re.fullmatch(worker, line) for line in (*before, decode, prefill)]
    assert [found and found[1] for found in named] == [
        *("decode-1", "decode-2", "prefill-1"),
        *("decode-1", "prefill-1"),
    ]
    assert drained == "decode-2 has left, and 6 requests meanwhile: 48 tokens"
