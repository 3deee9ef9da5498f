"""Offers that came before their prefill request."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvxfer.clock import Clock
from kvxfer.errors import Backpressure
from kvxfer.kv.block_pool import BlockIds
from kvxfer.kv.lease import Lease
from kvxfer.kv.messages import Offer
from kvxfer.kv.pair import KvPair

_LEAST_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True)
class EarlyOffer:
    """A verified OFFER, its unpacked block table, the time that decode gave it, and that until no
    request can come with its ticket."""

    pair: KvPair
    offer: Offer
    blocks: BlockIds
    lease: Lease
    ticket: Lease

    def end(self) -> None:
        """It waits no longer."""
        self.lease.end()
        self.ticket.end()


class EarlyOffers:
    """Keeps offers until their request comes, their lease ends or their ticket expires. Loop
    only."""

    def __init__(self, max_per_peer: int, clock: Clock) -> None:
        self._max_per_peer = max_per_peer
        self._clock = clock
        # By transfer, and the ranks of decode in it.
        self._offers: dict[str, dict[KvPair, EarlyOffer]] = {}
        self._per_peer: collections.Counter[KvPair] = collections.Counter()

    def __len__(self) -> int:
        return self._per_peer.total()

    def keep(
        self,
        pair: KvPair,
        offer: Offer,
        blocks: BlockIds,
        expires_at: float,
        *,
        lease_over: Callable[[EarlyOffer], None],
        ticket_expired: Callable[[EarlyOffer], None],
    ) -> None:
        """Keeps an offer whose ticket expires at this time; one of both is called with it, no
        longer kept, when its lease ends or its ticket has expired.

        Raises Backpressure where the peer has too many waiting.
        """
        if self._per_peer[pair] >= self._max_per_peer:
            raise Backpressure(
                f"transfer {offer.transfer_id}: {self._max_per_peer} offers of this decode worker "
                "wait for their prefill requests already; send requests to prefill first"
            )

        def remove() -> EarlyOffer:
            early = self._remove(offer.transfer_id, pair)
            early.end()
            return early

        lease = Lease(offer.lease_seconds, lambda: lease_over(remove()), self._clock)
        left = max(expires_at - self._clock.unix(), _LEAST_SECONDS)
        ticket = Lease(left, lambda: ticket_expired(remove()), self._clock)
        early = EarlyOffer(pair, offer, blocks, lease, ticket)
        self._offers.setdefault(offer.transfer_id, {})[pair] = early
        self._per_peer[pair] += 1

    def has(self, transfer_id: str, pair: KvPair) -> bool:
        """Whether one of the transfer's offers is of this peer."""
        return pair in self._offers.get(transfer_id, ())

    def take(self, transfer_id: str) -> list[EarlyOffer]:
        """Removes and returns the offers of a transfer, which are still to be ended."""
        return [self._remove(transfer_id, pair) for pair in list(self._offers.get(transfer_id, ()))]

    def take_all(self, pair: KvPair | None = None) -> list[EarlyOffer]:
        """Removes and returns the offers of one peer, or of all."""
        found = [
            (transfer_id, peer)
            for transfer_id, by_peer in self._offers.items()
            for peer in by_peer
            if pair is None or peer is pair
        ]
        return [self._remove(transfer_id, peer) for transfer_id, peer in found]

    def _remove(self, transfer_id: str, pair: KvPair) -> EarlyOffer:
        by_peer = self._offers[transfer_id]
        early = by_peer.pop(pair)
        if not by_peer:
            del self._offers[transfer_id]
        self._per_peer[pair] -= 1
        if not self._per_peer[pair]:
            del self._per_peer[pair]
        return early
