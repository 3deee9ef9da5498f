"""The tickets that an endpoint accepts: its identity (instance id, epoch, keys, model), the tickets
that were used here, and why their transfers failed. A ticket is valid once."""

from __future__ import annotations

import heapq
from typing import Literal, TypeAlias

from kvxfer.clock import Clock
from kvxfer.cluster_key import as_cluster_key
from kvxfer.errors import (
    KvxferError,
    TicketExpired,
    TicketInvalid,
    TransferRefused,
    without_traceback,
)
from kvxfer.instances import Role
from kvxfer.kv.messages import Hello
from kvxfer.kv.options import KvIdentity
from kvxfer.ticket import Ticket, TicketKeys, as_ticket_keys, verify_ticket
from kvxfer.watched_file import WatchedFile

Side: TypeAlias = Literal[Role.PREFILL, Role.DECODE]


class CurrentIdentity:
    """The identity of an endpoint now. Loop only. `epoch` changes with each new registration,
    `model` with an update of weights. `suspended` says why there is no memory for transfers; it is
    empty if there is."""

    def __init__(self, first: KvIdentity, clock: Clock) -> None:
        self.instance_id = first.instance_id
        self.model = first.model
        self.suspended = ""
        self._epochs = [first.epoch]
        self._clock = clock
        key = first.ticket_key
        self._key = key if isinstance(key, WatchedFile) else as_cluster_key(key)

    @property
    def epoch(self) -> int:
        return self._epochs[-1]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epochs.append(epoch)

    @property
    def keys(self) -> TicketKeys:
        """The cluster's current ticket keys."""
        if isinstance(self._key, WatchedFile):
            return self._key.current
        return as_ticket_keys(self._key)

    def require_memory(self) -> None:
        """Raises TransferRefused while there is no memory."""
        if self.suspended:
            raise TransferRefused(f"instance {self.instance_id!r} has no memory: {self.suspended}")

    def verify(self, token: str) -> Ticket:
        """Returns the ticket of a token. Raises TicketInvalid and TicketExpired."""
        return verify_ticket(token, self.keys, now=self._clock.unix())

    def side(self, ticket: Ticket) -> Role | None:
        """Returns the side that a ticket gives to this instance; None if it names others."""
        if self._is(ticket, Role.PREFILL):
            return Role.PREFILL
        return Role.DECODE if self._is(ticket, Role.DECODE) else None

    def require(self, ticket: Ticket, side: Side) -> None:
        """Raises TicketInvalid if the ticket names another instance or epoch for `side`."""
        if not self._is(ticket, side):
            raise _names(ticket, side, f"this is {self.instance_id!r} of epoch {self.epoch}")

    def _is(self, ticket: Ticket, side: Side) -> bool:
        if not ticket.bearer:
            return named(ticket, side) == (self.instance_id, self.epoch)
        # Prefill signed it: the blocks that it keeps outlive its registration, not its process.
        own = ticket.prefill_id == self.instance_id and ticket.prefill_epoch in self._epochs
        return own is (side is Role.PREFILL)


def require_peer(ticket: Ticket, side: Side, hello: Hello, where: str) -> None:
    """Raises TicketInvalid if the peer that sent `hello` is not the one that the ticket names."""
    if ticket.bearer:
        # Only prefill knows which of its epochs are of the same process.
        fits = side is Role.DECODE or ticket.prefill_id == hello.instance_id
    else:
        fits = named(ticket, side) == (hello.instance_id, hello.epoch)
    if not fits:
        raise _names(ticket, side, f"{where} {hello.instance_id!r} of epoch {hello.epoch}")


def named(ticket: Ticket, side: Side) -> tuple[str, int]:
    """Returns the instance id and epoch of one side."""
    if side is Role.PREFILL:
        return ticket.prefill_id, ticket.prefill_epoch
    return ticket.decode_id, ticket.decode_epoch


def _names(ticket: Ticket, side: Side, found: str) -> TicketInvalid:
    instance_id, epoch = named(ticket, side)
    return TicketInvalid(
        f"the ticket of transfer {ticket.transfer_id} names {side} worker {instance_id!r} of epoch "
        f"{epoch}, {found}; ask for a new ticket"
    )


Use: TypeAlias = Literal["offer", "prefill session", "decode session"]


class TransferLedger:
    """A memory of each transfer until its ticket expires; after that the ticket is refused anyway.

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
        time, and TicketExpired if it has expired since it was verified: then its first use may be
        forgotten."""
        if self._forget_expired() >= ticket.good_until:
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
        """Uses the ticket once for a rank of the worker that sent `hello`, and binds it to that
        worker. Raises TicketInvalid."""
        self.bind(ticket, hello)
        self.claim(ticket, use, hello.layout.rank)

    def bind(self, ticket: Ticket, hello: Hello) -> None:
        """Binds a bearer ticket to the worker that sent `hello`. Raises TicketInvalid if it is
        bound to another."""
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
        """Records why the transfer ended, for later messages about it."""
        if transfer_id in self._used:
            self._failures.setdefault(transfer_id, without_traceback(error))

    def failure(self, transfer_id: str) -> KvxferError | None:
        """Returns the error of a transfer that has failed, as a copy to be raised, or None."""
        error = self._failures.get(transfer_id)
        return error and without_traceback(error)

    def __len__(self) -> int:
        return len(self._used)

    def _remember(self, ticket: Ticket) -> set[tuple[Use, int]]:
        uses = self._used.get(ticket.transfer_id)
        if uses is None:
            uses = self._used[ticket.transfer_id] = set()
            heapq.heappush(self._expiries, (ticket.good_until, ticket.transfer_id))
        return uses

    def _forget_expired(self) -> float:
        """Forgets expired tickets, and returns the time."""
        now = self._clock.unix()
        while self._expiries and self._expiries[0][0] <= now:
            _, transfer_id = heapq.heappop(self._expiries)
            self._used.pop(transfer_id, None)
            self._bearers.pop(transfer_id, None)
            self._failures.pop(transfer_id, None)
        return now
