"""1,000 seeds of a simulated fleet: every promise holds, and everything that can happen did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.verify.simulation.seeds import Happened, assert_all_happened, assert_promises_hold
from verify.simulation.sessions.__main__ import SIMULATION
from verify.simulation.sessions.fate import FAULTS, REQUEST_FAULTS

SEEDS = 1000
BATCH = 250
# The faults, and the outcomes that they must lead to in some seed.
_REACHED = (
    *FAULTS, *REQUEST_FAULTS, "direct", "bearer", "brokered", "by offer", "plain",
    "MLA", "layer groups", "pipeline stages", "epoch followed", "declined", "kept", "backpressure",
    "messages held back",
    "asked to revoke", "paths reset", "copies waited for", "heads put in order",
    "restarted peer refused",
    "request to no process", "has to be told",
    *(f"prefill: {end}" for end in (
        "ok", "aborted", "died", "TransferCancelled", "LeaseExpired", "PeerLost", "PeerTimeout",
        "TicketInvalid", "TicketExpired", "BlockPoolExhausted",
    )),
    *(f"decode: {end}" for end in (
        "ok", "aborted", "died", "TransferCancelled", "TransferRefused", "LeaseExpired",
        "PeerLost", "PeerTimeout", "PeerRestarted", "ConnectFailed", "TicketInvalid",
        "TicketExpired", "BlockPoolExhausted", "ChecksumMismatch",
    )),
)  # fmt: skip


@pytest.fixture(scope="module")
def happened() -> Iterator[Happened]:
    """The events of all batches together."""
    counts = Happened()
    yield counts
    print(dict(sorted(counts.items())))


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_promise_holds_in_every_seed(first: int, happened: Happened) -> None:
    assert_promises_hold(SIMULATION, first, BATCH, happened)


def test_everything_that_can_happen_did(happened: Happened) -> None:
    assert_all_happened(happened, SEEDS, _REACHED)
