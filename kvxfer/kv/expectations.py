"""Brings EXPECT and decode request of a brokered transfer together, whichever comes first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.clock import Clock
from kvxfer.errors import KvxferError, LeaseExpired, TicketInvalid, TransferCancelled

if TYPE_CHECKING:
    from kvxfer.kv.pair import KvPair
    from kvxfer.ticket import Ticket


@dataclass(slots=True)
class _Expected:
    """A prefill worker waits for the OFFER, over this connection; with an error it did."""

    ticket: Ticket
    pair: KvPair
    error: KvxferError | None = None


class Expectations:
    """The decode side of an endpoint before there is a session. Loop only.

    What came is remembered until its ticket expires, also where prefill has given up or is lost
    meanwhile: so decode is told at once, and may come again where it found no free blocks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expected: dict[str, _Expected] = {}
        self._waiting: dict[str, asyncio.Future[_Expected]] = {}

    def __len__(self) -> int:
        """How many decode requests wait."""
        return len(self._waiting)

    def expect(self, ticket: Ticket, pair: KvPair) -> None:
        """An EXPECT whose ticket is verified has come."""
        self._forget_expired()
        expected = self._expected[ticket.transfer_id] = _Expected(ticket, pair)
        waiting = self._waiting.get(ticket.transfer_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(expected)

    def cancel(self, pair: KvPair, transfer_id: str, reason: str) -> None:
        """Prefill gives a transfer up that has no session here."""
        expected = self._expected.get(transfer_id)
        if expected is not None and expected.pair is pair:
            expected.error = TransferCancelled(
                f"transfer {transfer_id}: cancelled by prefill worker "
                f"{expected.ticket.prefill_id!r}: {reason}"
            )

    def drop(self, pair: KvPair, error: KvxferError) -> None:
        """The prefill worker is gone."""
        for expected in self._expected.values():
            if expected.pair is pair:
                expected.error = expected.error or error

    def close(self, error: KvxferError) -> None:
        """Nobody is waited for any longer."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def prefill_of(self, ticket: Ticket, seconds: float) -> KvPair:
        """The connection of a ticket's prefill worker, once that waits for the OFFER.

        Raises LeaseExpired after `seconds`, TicketInvalid where somebody waits under this ticket
        already, and why prefill has given up or is gone.
        """
        transfer_id = ticket.transfer_id
        if transfer_id in self._waiting:
            raise TicketInvalid(
                f"the ticket of transfer {transfer_id} is in use: another decode request waits for "
                "its prefill worker; ask the control plane for a new one"
            )
        expected = self._expected.get(transfer_id)
        if expected is None:
            waiting = self._waiting[transfer_id] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(seconds):
                    expected = await waiting
            except TimeoutError:
                raise LeaseExpired(
                    f"transfer {transfer_id}: prefill worker {ticket.prefill_id!r} did not ask for "
                    f"an offer within {seconds:g} s; send it the request too, with a brokered "
                    "handshake and the address of this engine"
                ) from None
            finally:
                del self._waiting[transfer_id]
        if expected.error is not None:
            raise expected.error
        return expected.pair

    def _forget_expired(self) -> None:
        now = self._clock.unix()
        while self._expected:
            transfer_id, oldest = next(iter(self._expected.items()))
            if oldest.ticket.expires_at > now:
                return
            del self._expected[transfer_id]
