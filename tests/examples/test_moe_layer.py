from __future__ import annotations

import re

import pytest

from tests.examples.programs import run_example

pytestmark = pytest.mark.native

WHY = "token 0, choice 0: expert 31; ids are 0 to 15, and -1 for no expert"
WHOLE = r"4 batches as in one process, at most \de-0[678] apart"


def test_a_layer_over_ranks_equals_the_dense_one_despite_a_refusal_and_a_kill() -> None:
    lines = run_example("moe_layer.py")
    said = [
        [line.removeprefix(f"rank {rank}  ") for line in lines if line.startswith(f"rank {rank} ")]
        for rank in range(4)
    ]
    assert [each[0] for each in said] == [
        f"step 1: StepRefused: rank 1 refused step 1: {WHY}",
        f"step 1: InvalidArgument: {WHY}",
        f"step 1: StepRefused: rank 1 refused step 1: {WHY}",
        "killed",
    ]
    # Rank 1 has the experts of rank 3, so it need not send again.
    again = "step 3: without rank 3, so it is sent again"
    assert [each[1:-1] for each in said] == [[again], [], [again], []]
    assert all(re.fullmatch(WHOLE, each[-1]) for each in said[:3])
