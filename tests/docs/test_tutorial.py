"""The tutorial as far as it needs no vLLM; tests/vllm/test_tutorial.py has all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.tutorial import VLLM, type_tutorial


@pytest.mark.realtime
@pytest.mark.timeout(600)
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    type_tutorial(tmp_path, without=VLLM)
