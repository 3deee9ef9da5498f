"""A few of the rounds of `make chaos SUITE=moe`, and tests that it finds its planted defects."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from verify.chaos.moe.__main__ import FABRICS, two_hosts
from verify.chaos.moe.breakage import Fault
from verify.chaos.moe.defects import DEFECTS
from verify.chaos.moe.member import Setting
from verify.chaos.moe.run import Round, choose, run

pytestmark = pytest.mark.realtime

ROUNDS = 20 if os.environ.get("KVXFER_MOE_WHOLE") else 3
"""The rounds over each fabric."""


@pytest.mark.parametrize("fabric", FABRICS)
def test_broken_ranks_cost_their_part(fabric: str) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with two_hosts() as hosts:
        if fabric == "hosts" and not hosts:
            pytest.skip("needs network namespaces")
        for _ in range(ROUNDS):
            round_ = choose(fabric, rng, hosts)
            run(round_)
            assert not round_.broken, f"{round_.setting}, {round_.faults}"


@pytest.mark.parametrize("defect", DEFECTS)
def test_broken_code_is_found(defect: str) -> None:
    prepare: Callable[[], None] = DEFECTS[defect]
    setting = Setting(4, "tcp", layout="experts", overlap=False, copies=2, seed=1)
    round_ = Round(setting, {2: Fault("kill", "before combine_send", 4, 0.0)}, rejoins=False)
    run(round_, prepare=prepare)
    assert round_.broken
