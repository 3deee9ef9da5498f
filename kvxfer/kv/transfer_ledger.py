"""Which tickets were used here, and why their transfers failed: a ticket is good once."""

from __future__ import annotations

import heapq
from typing import Literal, TypeAlias

from kvxfer.clock import Clock
from kvxfer.errors import KvxferError, TicketExpired, TicketInvalid, without_traceback
from kvxfer.kv.messages import Hello
from kvxfer.ticket import Ticket

Use: TypeAlias = Literal["offer", "prefill session", "decode session"]


class TransferLedger:
    """Remembers each transfer until its ticket expires; after that the ticket is refused anyway.

    Loop only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used: dict[str, set[tuple[Use, int]]] = {}
        self._bearers: dict[str, tuple[str, int]] = {}
        self._failures: dict[str, KvxferError] = {}
        self._expiries: list[tuple[float, str]] = []

    def claim(self, ticket: Ticket, use: Use, rank: int = 0) -> None:
        """Uses the ticket once for `use` by a rank of the peer. Raises TicketInvalid the second
        time, and TicketExpired where it has expired since it was verified: then nothing is known
        of its first use."""
        if self._forget_expired() >= ticket.expires_at:
            raise TicketExpired(
                f"the ticket of transfer {ticket.transfer_id} expired before its {use}; "
                "send the request again for a new one"
            )
        uses = self._remember(ticket)
        if (use, rank) in uses:
            raise TicketInvalid(
                f"the ticket of transfer {ticket.transfer_id} was already used for its {use}; "
                "send the request again for a new one"
            )
        uses.add((use, rank))

    def claim_by(self, ticket: Ticket, use: Use, hello: Hello) -> None:
        """Uses the ticket once for a rank of the worker that said `hello`, whose it is then. Raises
        TicketInvalid."""
        self.bind(ticket, hello)
        self.claim(ticket, use, hello.layout.rank)

    def bind(self, ticket: Ticket, hello: Hello) -> None:
        """A bearer ticket is from now on that of the worker that said `hello`. Raises TicketInvalid
        where it is another's."""
        if not ticket.bearer:
            return
        self._forget_expired()
        self._remember(ticket)
        this = (hello.instance_id, hello.epoch)
        bearer = self._bearers.setdefault(ticket.transfer_id, this)
        if bearer != this:
            raise TicketInvalid(
                f"the ticket of transfer {ticket.transfer_id} was already used by decode worker "
                f"{bearer[0]!r}; send the request to prefill again"
            )

    def fail(self, transfer_id: str, error: KvxferError) -> None:
        """Records why the transfer ended, for whoever comes for it later."""
        if transfer_id in self._used:
            self._failures.setdefault(transfer_id, without_traceback(error))

    def failure(self, transfer_id: str) -> KvxferError | None:
        """Why the transfer has ended, if it has failed; an error of one's own, to be raised."""
        error = self._failures.get(transfer_id)
        return error and without_traceback(error)

    def __len__(self) -> int:
        return len(self._used)

    def _remember(self, ticket: Ticket) -> set[tuple[Use, int]]:
        uses = self._used.get(ticket.transfer_id)
        if uses is None:
            uses = self._used[ticket.transfer_id] = set()
            heapq.heappush(self._expiries, (ticket.expires_at, ticket.transfer_id))
        return uses

    def _forget_expired(self) -> float:
        """Returns the time."""
        now = self._clock.unix()
        while self._expiries and self._expiries[0][0] <= now:
            _, transfer_id = heapq.heappop(self._expiries)
            self._used.pop(transfer_id, None)
            self._bearers.pop(transfer_id, None)
            self._failures.pop(transfer_id, None)
        return now
