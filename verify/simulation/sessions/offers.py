"""The OFFERs that reach a prefill process before their request. With connectors that get no tickets
from a control plane, a request takes its ticket from the OFFER."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvxfer.errors import KvxferError
from kvxfer.ticket import Ticket


class Offers:
    """The OFFERs of one process, used on its loop. `decline` refuses a ticket, with a reason."""

    def __init__(self, decline: Callable[[str, str], None]) -> None:
        self._refuse = decline
        self._tokens: dict[str, str] = {}
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._left: set[str] = set()

    def told(self, ticket: Ticket) -> None:
        """Takes the ticket of an OFFER: the endpoint's `on_offer`."""
        transfer_id = ticket.transfer_id
        self._tokens.setdefault(transfer_id, ticket.token)
        waiting = self._waiting.get(transfer_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(ticket.token)
        elif transfer_id in self._left:
            self._decline(transfer_id)

    async def of(self, transfer_id: str, seconds: float) -> str:
        """Waits for the OFFER of a transfer. Returns its ticket. Raises TimeoutError."""
        if transfer_id in self._tokens:
            return self._tokens[transfer_id]
        waiting = self._waiting.get(transfer_id)
        if waiting is None:
            waiting = self._waiting[transfer_id] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(seconds):
            return await asyncio.shield(waiting)

    def leave(self, transfer_id: str) -> None:
        """Refuses the OFFER of a request that will not come, now or when it arrives."""
        self._left.add(transfer_id)
        if transfer_id in self._tokens:
            self._decline(transfer_id)

    def _decline(self, transfer_id: str) -> None:
        with contextlib.suppress(KvxferError):  # the transfer has ended, or its ticket has expired
            self._refuse(self._tokens[transfer_id], "the request was aborted")
