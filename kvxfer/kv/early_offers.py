"""Offers that came before their prefill request."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.errors import Backpressure
from kvxfer.kv.block_pool import BlockIds
from kvxfer.kv.lease import Lease
from kvxfer.kv.messages import Offer
from kvxfer.kv.pair import KvPair


@dataclass(frozen=True, slots=True)
class EarlyOffer:
    """A verified OFFER, its unpacked block table, and the time that decode gave it."""

    pair: KvPair
    offer: Offer
    blocks: BlockIds
    lease: Lease


class EarlyOffers:
    """Keeps offers until their request comes or their lease ends. Loop only."""

    def __init__(self, max_per_peer: int) -> None:
        self._max_per_peer = max_per_peer
        self._offers: dict[str, EarlyOffer] = {}
        self._per_peer: collections.Counter[KvPair] = collections.Counter()

    def __len__(self) -> int:
        return len(self._offers)

    def keep(
        self,
        pair: KvPair,
        offer: Offer,
        blocks: BlockIds,
        expired: Callable[[EarlyOffer], None],
    ) -> None:
        """Keeps an offer; `expired` is called with it, no longer kept, when its lease ends.

        Raises Backpressure where the peer has too many waiting.
        """
        if self._per_peer[pair] >= self._max_per_peer:
            raise Backpressure(
                f"transfer {offer.transfer_id}: {self._max_per_peer} offers of this decode worker "
                "wait for their prefill requests already; send requests to prefill first"
            )

        def expire() -> None:
            early = self.take(offer.transfer_id)
            if early is not None:
                expired(early)

        lease = Lease(offer.lease_seconds, expire)
        self._offers[offer.transfer_id] = EarlyOffer(pair, offer, blocks, lease)
        self._per_peer[pair] += 1

    def take(self, transfer_id: str) -> EarlyOffer | None:
        """Removes and returns the offer of a transfer, its lease still running."""
        early = self._offers.pop(transfer_id, None)
        if early is not None:
            self._per_peer[early.pair] -= 1
            if not self._per_peer[early.pair]:
                del self._per_peer[early.pair]
        return early

    def take_all(self, pair: KvPair | None = None) -> list[EarlyOffer]:
        """Removes and returns the offers of one peer, or of all."""
        found = [
            transfer_id
            for transfer_id, early in self._offers.items()
            if pair is None or early.pair is pair
        ]
        return [early for transfer_id in found if (early := self.take(transfer_id))]
