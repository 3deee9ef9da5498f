"""Real processes and a real network: whoever survives gets a named error, and no byte lands late.

How soon it comes is measured by `make chaos`."""

from __future__ import annotations

import random
from typing import Final

import pytest

from .catalogue import FABRICS
from .chaos import Round, arena
from .link import why_no_links

# A machine that is very busy can make a moment's stall long enough for a timeout.
_LOST: Final = {"peer-lost", "peer-timeout", None}
_CUT_OFF: Final = ("kill", "freeze", "cut", "port down", "half-open", "reset")
_ENDED_BY: Final[dict[str, set[str | None]]] = {
    **dict.fromkeys(_CUT_OFF, _LOST),
    "no memory": {"transfer-cancelled", "no-memory", *_LOST},
    "clock": {"ticket-expired", "transfer-refused", *_LOST},
}
_GIVEN_UP: Final = {"transfer-cancelled", *_LOST}


@pytest.mark.parametrize(
    "name", [fabric.name for fabric in FABRICS.values() if fabric.engine != "verbs"]
)
async def test_a_fault_costs_no_block_and_no_byte(name: str, rng: random.Random) -> None:
    fabric = FABRICS[name]
    if fabric.linked and (reason := why_no_links()):
        pytest.skip(reason)
    rounds: list[Round] = []
    async with arena(fabric) as workers:
        for fault in rng.sample(fabric.faults, k=len(fabric.faults)):
            rounds.append(await workers.round(fault, rng.getrandbits(32)))
            print(rounds[-1])
    assert [one.hung for one in rounds] == [""] * len(rounds)
    assert [one.wrong_bytes for one in rounds] == [0] * len(rounds)
    assert [one.leaked_blocks for one in rounds] == [0] * len(rounds)
    for one in rounds:
        act = one.fault.removesuffix(" prefill").removesuffix(" decode")
        assert one.error in _ENDED_BY.get(act, _GIVEN_UP), one
