from __future__ import annotations

import pytest

from tests.examples.programs import run_example

pytestmark = pytest.mark.native


def test_pages_arrive_where_they_should_and_a_killed_sender_is_named() -> None:
    assert run_example("pages.py") == [
        "3 pages are as sent, the others are untouched",
        "100 pages are as sent, the others are untouched",
        "the sender is killed: peer-lost, 0 immediates came",
    ]
