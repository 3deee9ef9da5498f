from __future__ import annotations

import pytest

from kvxfer.clock import CLOCK_LEEWAY
from kvxfer.errors import TicketExpired, TicketInvalid, TransferCancelled
from kvxfer.kv.admission import TransferLedger
from kvxfer.kv.messages import Hello
from kvxfer.kv_versions import OLDEST
from kvxfer.layout import KvLayout
from kvxfer.ticket import Ticket
from tests.virtual_time import VirtualClock

NOW = VirtualClock().unix()


def ticket(transfer_id: str, seconds: float = 60.0) -> Ticket:
    return Ticket(transfer_id, "request", "p", 1, "d", 1, NOW + seconds)


def test_a_ticket_is_valid_once_for_each_use() -> None:
    ledger = TransferLedger(VirtualClock())
    ledger.claim(ticket("a"), "offer")
    ledger.claim(ticket("a"), "prefill session")
    ledger.claim(ticket("b"), "offer")
    with pytest.raises(TicketInvalid, match="transfer a was already used for its offer"):
        ledger.claim(ticket("a"), "offer")


def hello(instance_id: str, *, epoch: int = 1, rank: int = 0) -> Hello:
    layout = KvLayout(
        num_layers=1,
        num_kv_heads=2,
        head_size=8,
        dtype="float32",
        block_size=4,
        tp_size=2,
        tp_rank=rank,
    )
    return Hello(OLDEST, instance_id, epoch, layout, 1, (), permutes=False)


def test_a_bearer_ticket_is_valid_once_for_each_rank_of_one_worker() -> None:
    ledger = TransferLedger(VirtualClock())
    bearer = Ticket("a", "request", "p", 1, "", 0, NOW + 60)
    ledger.claim_by(bearer, "offer", hello("d"))
    for other in (hello("e", rank=1), hello("d", epoch=2, rank=1)):
        with pytest.raises(TicketInvalid, match="already used by decode worker 'd'"):
            ledger.claim_by(bearer, "offer", other)
    ledger.claim_by(bearer, "offer", hello("d", rank=1))
    with pytest.raises(TicketInvalid, match="already used for its offer"):
        ledger.claim_by(bearer, "offer", hello("d", rank=1))


def test_a_bound_bearer_ticket_is_still_valid_once_and_then_forgotten() -> None:
    ledger = TransferLedger(VirtualClock())
    bearer = Ticket("a", "request", "p", 1, "", 0, NOW + 60)
    ledger.bind(bearer, hello("d"))
    ledger.bind(bearer, hello("d", rank=1))
    for use in (ledger.bind, lambda ticket, of: ledger.claim_by(ticket, "offer", of)):
        with pytest.raises(TicketInvalid, match="already used by decode worker 'd'"):
            use(bearer, hello("e"))
    ledger.claim_by(bearer, "offer", hello("d"))
    late = Ticket("b", "request", "p", 1, "", 0, NOW - CLOCK_LEEWAY - 1)
    ledger.bind(late, hello("d"))
    assert len(ledger) == 2
    ledger.bind(late, hello("e"))  # the earlier binding is forgotten
    ledger.bind(ticket("of a pair"), hello("e"))
    assert len(ledger) == 2


def test_the_first_failure_is_remembered() -> None:
    ledger = TransferLedger(VirtualClock())
    ledger.claim(ticket("a"), "offer")
    ledger.fail("a", TransferCancelled("first"))
    ledger.fail("a", TransferCancelled("second"))
    ledger.fail("unknown", TransferCancelled("unknown"))
    remembered = [ledger.failure("a"), ledger.failure("a")]
    assert [(type(error), str(error)) for error in remembered] == [(TransferCancelled, "first")] * 2
    assert remembered[0] is not remembered[1]  # each is raised, with its own traceback
    assert ledger.failure("unknown") is None


def test_transfers_are_forgotten_when_their_tickets_expire() -> None:
    clock = VirtualClock()
    ledger = TransferLedger(clock)
    late = ticket("late", seconds=30)
    ledger.claim(late, "offer")
    ledger.fail("late", TransferCancelled("gone"))
    clock.advance(30)
    with pytest.raises(TicketInvalid, match="transfer late was already used for its offer"):
        ledger.claim(late, "offer")  # by another clock it may still be valid
    clock.advance(CLOCK_LEEWAY)
    ledger.claim(ticket("fresh"), "offer")
    assert len(ledger) == 1
    assert ledger.failure("late") is None
    with pytest.raises(TicketExpired, match="transfer late expired before its offer"):
        ledger.claim(late, "offer")
