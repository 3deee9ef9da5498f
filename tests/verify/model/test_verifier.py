"""Spin on the smallest sizes: the protocol holds, and a missing fence is found."""

from __future__ import annotations

import dataclasses

import pytest

from verify.model.checks import FENCE_REMOVED, PATH_ENDS, PATH_STOP_REMOVED, SMALL
from verify.model.verifier import SpinError, read_verdict, run

pytestmark = pytest.mark.native


def test_one_transfer_keeps_every_invariant_under_every_fault() -> None:
    verdict = run(SMALL)
    assert (verdict.errors, verdict.violated) == (0, None)
    assert verdict.met
    assert verdict.states > 10_000
    mutated = dataclasses.replace(SMALL, refuted="invariant 1")
    assert not dataclasses.replace(verdict, check=mutated).met


def test_without_the_fence_a_byte_lands_in_a_page_that_was_given_back() -> None:
    verdict = run(FENCE_REMOVED)
    assert verdict.violated == "invariant 1"
    assert verdict.met


def test_a_path_that_ends_loses_no_count_unless_its_sides_stop_at_once() -> None:
    verdict = run(PATH_ENDS)
    assert verdict.met
    assert verdict.states > 10_000
    assert run(PATH_STOP_REMOVED).violated == "invariant 6"


REPORT = """\
error: max search depth too small
State-vector 100 byte, depth reached 19, errors: 0
       12 states, stored
       20 transitions (= stored+matched)
  128.000	total actual memory usage
pan: elapsed time 0.1 seconds
"""


def test_an_incomplete_search_gives_no_verdict() -> None:
    with pytest.raises(SpinError, match="max search depth too small"):
        read_verdict(SMALL, REPORT)
