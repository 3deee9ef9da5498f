"""Faults of `make chaos SUITE=weights`, and tests that it finds its planted defects."""

from __future__ import annotations

import random

import pytest

from kvxfer.weights.transfer.settings import Mode
from verify.chaos.weights.__main__ import KINDS
from verify.chaos.weights.catalogue import catalogue
from verify.chaos.weights.defects import DEFECTS
from verify.chaos.weights.run import run

pytestmark = pytest.mark.native


@pytest.mark.parametrize(("fabric", "mode"), KINDS)
async def test_faulted_updates_keep_their_promises(fabric: str, mode: Mode) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rounds = await run(fabric, 4, random.Random(seed), mode=mode)
    assert [line for each in rounds for line in each.broken] == []
    assert len(rounds) == 4


@pytest.mark.parametrize("defect", DEFECTS)
async def test_broken_code_is_found(defect: str) -> None:
    _, mode, fault = DEFECTS[defect]
    assert fault in catalogue(mode)
    (only,) = await run("local", 1, random.Random(1), mode=mode, faults=[fault], defect=defect)
    assert only.broken, f"{fault} does not show that {defect}"
