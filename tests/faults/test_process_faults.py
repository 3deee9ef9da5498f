"""Real processes: whoever survives knows within a second, and no byte lands late."""

from __future__ import annotations

import random

import pytest

from .chaos import FABRICS, FAULTS, Act, Fabric, Round, arena, percentile

ROUNDS_PER_FABRIC = 6
MAX_DETECTION_SECONDS = 1.0
NAMED: dict[Act, set[str | None]] = {
    "kill": {"peer-lost", None},
    "freeze": {"peer-timeout", None},
    # A machine that is very busy can make a stall long enough for a timeout.
    "stall": {"transfer-cancelled", "peer-timeout", "peer-lost", None},
}


@pytest.mark.parametrize("fabric", FABRICS)
async def test_a_killed_frozen_or_stalled_worker_costs_no_block_and_no_byte(
    fabric: Fabric, rng: random.Random
) -> None:
    rounds: list[Round] = []
    faults = list(FAULTS) + rng.choices(FAULTS, k=ROUNDS_PER_FABRIC - len(FAULTS))
    rng.shuffle(faults)
    async with arena(fabric) as workers:
        for act, victim in faults:
            rounds.append(await workers.round(act, victim, rng.getrandbits(32)))
            print(rounds[-1])
    detections = [one.detection for one in rounds if one.detection is not None]
    if detections:
        print(
            f"{fabric}: detection p50 {percentile(detections, 0.5):.3f} s, "
            f"p99 {percentile(detections, 0.99):.3f} s"
        )
    assert [one.wrong_bytes for one in rounds] == [0] * len(rounds)
    assert [one.leaked_blocks for one in rounds] == [0] * len(rounds)
    assert all(detection <= MAX_DETECTION_SECONDS for detection in detections)
    for one in rounds:
        assert one.error in NAMED[one.act]
