"""Matches prefill's requests with decode's offers, by the room that a router chose."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import InvalidArgument, KvxferError, LeaseExpired
from kvxfer.ticket import Ticket

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """A number that a router, or any client, puts into a request, and the prompt that this side was
    given with it."""

    number: int
    prompt: bytes
    """The digest of the prompt and the LoRA."""

    @property
    def transfer_id(self) -> str:
        """The transfer id, equal on both sides if both were given the same prompt. It is valid
        once, and so is a room."""
        return f"sglang-{self.number:x}-{self.prompt.hex()}"


class Rooms:
    """The rooms of a prefill instance. Loop only.

    `decline` refuses an offer, given its ticket and the reason.
    """

    def __init__(
        self,
        decline: Callable[[str, str], None],
        lease_seconds: float,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._decline = decline
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._waiting: dict[int, tuple[Room, asyncio.Future[str]]] = {}
        # Offers without a request; rooms whose request ended without an offer, with their expiry.
        self._offers: dict[str, Ticket] = {}
        self._left: dict[int, tuple[float, str]] = {}

    async def ticket_for(self, room: Room) -> str:
        """Returns the ticket of the offer for a room as soon as decode has made it.

        Raises LeaseExpired if decode makes none, InvalidArgument if another request has the room.
        """
        self._forget_expired()
        if room.number in self._waiting:
            raise InvalidArgument(
                f"room {room.number} is that of another request that waits for its decode server; "
                "a router must choose a new room for each request"
            )
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[room.number] = (room, found)
        self._left.pop(room.number, None)
        for ticket in list(self._offers.values()):
            if _number(ticket) == room.number:
                del self._offers[ticket.transfer_id]
                self._meet(room, found, ticket)
        why = "the request was aborted on prefill"
        try:
            async with asyncio.timeout(self._lease_seconds):
                return await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled():  # an offer that will not be used
                self._refuse(found.result(), why)
            raise
        except TimeoutError:
            why = (
                f"room {room.number}: no decode server made an offer within "
                f"{self._lease_seconds:g} s"
            )
            raise LeaseExpired(why) from None
        finally:
            del self._waiting[room.number]
            if not found.done() or found.cancelled():
                self._left[room.number] = (self._clock.unix() + self._lease_seconds, why)

    def offered(self, ticket: Ticket) -> None:
        """Takes an offer of decode, whose ticket is verified."""
        self._forget_expired()
        number = _number(ticket)
        if number in self._waiting:
            self._meet(*self._waiting[number], ticket)
        elif number in self._left:
            self._refuse(ticket.token, self._left[number][1])
        else:
            self._offers[ticket.transfer_id] = ticket

    def _meet(self, room: Room, found: asyncio.Future[str], ticket: Ticket) -> None:
        if ticket.transfer_id == room.transfer_id and not found.done():
            found.set_result(ticket.token)
        else:
            why = f"room {room.number} is that of another prompt or LoRA on prefill"
            self._refuse(ticket.token, why)

    def _refuse(self, token: str, why: str) -> None:
        logger.warning("an offer is refused: %s", why)
        try:
            self._decline(token, why)
        except KvxferError as error:
            logger.info("nothing to refuse: %s", error)

    def _forget_expired(self) -> None:
        now = self._clock.unix()
        self._offers = {key: of for key, of in self._offers.items() if of.good_until > now}
        self._left = {key: left for key, left in self._left.items() if left[0] > now}


def _number(ticket: Ticket) -> int:
    return int(ticket.request_id) if ticket.request_id.isdecimal() else -1
