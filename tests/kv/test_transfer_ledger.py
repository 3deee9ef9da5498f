from __future__ import annotations

import time

import pytest

from kvxfer.errors import TicketInvalid, TransferCancelled
from kvxfer.kv.transfer_ledger import TransferLedger
from kvxfer.ticket import Ticket


def ticket(transfer_id: str, seconds: float = 60.0) -> Ticket:
    return Ticket(transfer_id, "request", "p", 1, "d", 1, time.time() + seconds)


def test_a_ticket_is_good_once_per_use() -> None:
    ledger = TransferLedger()
    ledger.claim(ticket("a"), "offer")
    ledger.claim(ticket("a"), "prefill session")
    ledger.claim(ticket("b"), "offer")
    with pytest.raises(TicketInvalid, match="transfer a was already used for its offer"):
        ledger.claim(ticket("a"), "offer")


def test_the_first_failure_is_remembered() -> None:
    ledger = TransferLedger()
    ledger.claim(ticket("a"), "offer")
    first = TransferCancelled("first")
    ledger.fail("a", first)
    ledger.fail("a", TransferCancelled("second"))
    ledger.fail("unknown", TransferCancelled("of nobody"))
    assert ledger.failure("a") is first
    assert ledger.failure("unknown") is None


def test_transfers_are_forgotten_when_their_tickets_expire() -> None:
    ledger = TransferLedger()
    ledger.claim(ticket("late", seconds=-1), "offer")
    ledger.fail("late", TransferCancelled("gone"))
    ledger.claim(ticket("fresh"), "offer")
    assert len(ledger) == 1
    assert ledger.failure("late") is None
    ledger.claim(ticket("late"), "offer")
