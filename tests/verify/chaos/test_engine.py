"""Real processes and a real network: a survivor gets a named error, and no byte lands late.

`make chaos` measures the time until the error.
"""

from __future__ import annotations

import random
from typing import Final

import pytest

from verify.chaos.engine.catalogue import FABRICS
from verify.chaos.engine.chaos import Round, arena
from verify.chaos.link import why_no_links

pytestmark = pytest.mark.realtime

# On a very busy machine, a moment's stall may exceed the default timeout.
_PATIENT: Final = {"KVXFER_PEER_TIMEOUT": "2"}
_GIVEN_UP: Final = {"transfer-cancelled", "peer-timeout", "peer-lost", None}
_ENDED_BY: Final[dict[str, set[str | None]]] = {
    "kill": {"peer-lost", None},
    "freeze": {"peer-timeout", None},
    "cut": {"peer-timeout", None},
    "port down": {"peer-timeout", "peer-lost", None},
    "half-open": {"peer-timeout", None},
    "reset": {"peer-lost", None},
    # Python may end from lack of memory.
    "no memory": {"transfer-cancelled", "no-memory", "peer-lost", None},
    "clock": {"ticket-expired", "transfer-refused", None},
}


@pytest.mark.parametrize(
    "name", [fabric.name for fabric in FABRICS.values() if fabric.engine != "verbs"]
)
async def test_a_fault_costs_no_block_and_no_byte(name: str, rng: random.Random) -> None:
    fabric = FABRICS[name]
    if fabric.linked and (reason := why_no_links()):
        pytest.skip(reason)
    rounds: list[Round] = []
    async with arena(fabric, _PATIENT) as workers:
        for fault in rng.sample(fabric.faults, k=len(fabric.faults)):
            rounds.append(await workers.round(fault, rng.getrandbits(32)))
            print(rounds[-1])
    assert [one.hung for one in rounds] == [""] * len(rounds)
    assert [one.wrong_bytes for one in rounds] == [0] * len(rounds)
    assert [one.leaked_blocks for one in rounds] == [0] * len(rounds)
    for one in rounds:
        act = one.fault.removesuffix(" prefill").removesuffix(" decode")
        assert one.error in _ENDED_BY.get(act, _GIVEN_UP), one
