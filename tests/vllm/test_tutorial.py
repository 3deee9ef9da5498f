"""The whole tutorial, with vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.tutorial import type_tutorial


@pytest.mark.realtime
@pytest.mark.timeout(900)
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    type_tutorial(tmp_path)
