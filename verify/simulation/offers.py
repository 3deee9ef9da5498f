"""OFFERs that reach a prefill process before their request, as with a connector that has no tickets
of a control plane."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from kvxfer.ticket import Ticket

    from .process import Process


class Offers:
    """The OFFERs of one process, used on its loop."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._tokens: dict[str, str] = {}
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._left: set[str] = set()

    def told(self, ticket: Ticket) -> None:
        """The endpoint's `on_offer`."""
        transfer_id = ticket.transfer_id
        self._tokens.setdefault(transfer_id, ticket.token)
        waiting = self._waiting.get(transfer_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(ticket.token)
        elif transfer_id in self._left:
            self._decline(transfer_id)

    async def of(self, transfer_id: str, seconds: float) -> str:
        """The ticket of the OFFER of a transfer. Raises TimeoutError."""
        if transfer_id in self._tokens:
            return self._tokens[transfer_id]
        waiting = self._waiting.get(transfer_id)
        if waiting is None:
            waiting = self._waiting[transfer_id] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(seconds):
            return await asyncio.shield(waiting)

    def leave(self, transfer_id: str) -> None:
        """The request will not come. Its OFFER is refused, now or when it comes."""
        self._left.add(transfer_id)
        if transfer_id in self._tokens:
            self._decline(transfer_id)

    def _decline(self, transfer_id: str) -> None:
        with contextlib.suppress(KvxferError):  # it has ended already, or its ticket has expired
            self._process.endpoint.decline(self._tokens[transfer_id], "the request was aborted")
