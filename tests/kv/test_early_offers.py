from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import Backpressure
from kvxfer.kv.messages import Offer
from kvxfer.kv.waiting import EarlyOffer, EarlyOffers
from tests.virtual_time import loop_clock, passes

BLOCKS = np.array([1, 2], dtype=np.int32)


def offer(transfer_id: str, lease_seconds: float = 60.0) -> Offer:
    return Offer(transfer_id, "ticket", b"\1\0\0\0", (b"grant",), 7, lease_seconds)


def never(early: EarlyOffer) -> None:
    raise AssertionError(early)


LATER = 2e9
NEVER: Any = {"lease_over": never, "ticket_expired": never}


async def test_an_offer_is_taken_once() -> None:
    offers, pair = EarlyOffers(4, loop_clock()), _pair("a")
    offers.keep(pair, offer("t"), BLOCKS, LATER, **NEVER)
    [early] = offers.take("t")
    assert (early.connection, early.offer.transfer_id, early.blocks.tolist()) == (pair, "t", [1, 2])
    early.end()
    assert offers.take("t") == []
    assert len(offers) == 0


async def test_the_ranks_of_a_transfer_are_taken_together() -> None:
    offers = EarlyOffers(1, loop_clock())
    first, second = _pair("a"), _pair("b")
    offers.keep(first, offer("t"), BLOCKS, LATER, **NEVER)
    offers.keep(second, offer("t"), BLOCKS, LATER, **NEVER)
    assert len(offers) == 2
    assert [early.connection for early in offers.take("t")] == [first, second]
    assert len(offers) == 0


async def test_the_bound_is_per_peer_and_counts_waiting_offers() -> None:
    offers = EarlyOffers(2, loop_clock())
    first, second = _pair("a"), _pair("b")
    for transfer_id in ("1", "2"):
        offers.keep(first, offer(transfer_id), BLOCKS, LATER, **NEVER)
    with pytest.raises(Backpressure, match="transfer 3: 2 offers of this decode worker wait"):
        offers.keep(first, offer("3"), BLOCKS, LATER, **NEVER)
    offers.keep(second, offer("4"), BLOCKS, LATER, **NEVER)
    offers.take("1")
    offers.keep(first, offer("5"), BLOCKS, LATER, **NEVER)
    assert {early.offer.transfer_id for early in offers.take_all(first)} == {"2", "5"}
    assert {early.offer.transfer_id for early in offers.take_all()} == {"4"}


async def test_an_offer_ends_with_its_ticket() -> None:
    offers = EarlyOffers(1, loop_clock())
    expired: list[EarlyOffer] = []
    offers.keep(
        _pair("a"),
        offer("t"),
        BLOCKS,
        loop_clock().unix() + 50.0,
        lease_over=never,
        ticket_expired=expired.append,
    )
    await passes(49.0)
    assert len(offers) == 1
    await passes(20.0)
    [early] = expired
    assert (early.offer.transfer_id, early.lease.seconds) == ("t", 60.0)
    assert len(offers) == 0


async def test_an_expired_offer_is_reported_and_no_longer_kept() -> None:
    offers = EarlyOffers(1, loop_clock())
    expired: list[EarlyOffer] = []
    pair = _pair("a")
    offers.keep(
        pair,
        offer("t", lease_seconds=5.0),
        BLOCKS,
        LATER,
        lease_over=expired.append,
        ticket_expired=never,
    )
    await passes(4.0)
    assert len(offers) == 1
    await passes(2.0)
    [early] = expired
    assert early.offer.transfer_id == "t"
    assert early.lease.seconds == 5.0
    assert len(offers) == 0
    offers.keep(pair, offer("u"), BLOCKS, LATER, **NEVER)


def _pair(name: str) -> Any:
    return name
