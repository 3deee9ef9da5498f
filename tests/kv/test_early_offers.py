from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import Backpressure
from kvxfer.kv.early_offers import EarlyOffer, EarlyOffers
from kvxfer.kv.messages import Offer

from .workers import SOON

BLOCKS = np.array([1, 2], dtype=np.int32)


def offer(transfer_id: str, lease_seconds: float = 60.0) -> Offer:
    return Offer(transfer_id, "ticket", b"\1\0\0\0", (b"grant",), 7, lease_seconds)


def never(early: EarlyOffer) -> None:
    raise AssertionError(early)


async def test_an_offer_is_taken_once() -> None:
    offers, pair = EarlyOffers(4), _pair("a")
    offers.keep(pair, offer("t"), BLOCKS, never)
    [early] = offers.take("t")
    assert (early.pair, early.offer.transfer_id, early.blocks.tolist()) == (pair, "t", [1, 2])
    early.lease.end()
    assert offers.take("t") == []
    assert len(offers) == 0


async def test_the_ranks_of_a_transfer_are_taken_together() -> None:
    offers = EarlyOffers(1)
    first, second = _pair("a"), _pair("b")
    offers.keep(first, offer("t"), BLOCKS, never)
    offers.keep(second, offer("t"), BLOCKS, never)
    assert len(offers) == 2
    assert [early.pair for early in offers.take("t")] == [first, second]
    assert len(offers) == 0


async def test_the_bound_is_per_peer_and_counts_what_waits() -> None:
    offers = EarlyOffers(2)
    first, second = _pair("a"), _pair("b")
    for transfer_id in ("1", "2"):
        offers.keep(first, offer(transfer_id), BLOCKS, never)
    with pytest.raises(Backpressure, match="transfer 3: 2 offers of this decode worker wait"):
        offers.keep(first, offer("3"), BLOCKS, never)
    offers.keep(second, offer("4"), BLOCKS, never)
    offers.take("1")
    offers.keep(first, offer("5"), BLOCKS, never)
    assert {early.offer.transfer_id for early in offers.take_all(first)} == {"2", "5"}
    assert {early.offer.transfer_id for early in offers.take_all()} == {"4"}


async def test_an_expired_offer_is_reported_and_no_longer_kept() -> None:
    offers = EarlyOffers(1)
    expired: asyncio.Queue[EarlyOffer] = asyncio.Queue()
    pair = _pair("a")
    offers.keep(pair, offer("t", lease_seconds=0.02), BLOCKS, expired.put_nowait)
    early = await asyncio.wait_for(expired.get(), SOON)
    assert early.offer.transfer_id == "t"
    assert early.lease.seconds == 0.02
    assert len(offers) == 0
    offers.keep(pair, offer("u"), BLOCKS, never)


def _pair(name: str) -> Any:
    return name
