"""Who an endpoint is: its instance id and epoch, the keys that verify tickets, and the model that
its KV cache is of."""

from __future__ import annotations

from typing import Literal, TypeAlias

from kvxfer.clock import Clock
from kvxfer.cluster_key import as_cluster_key
from kvxfer.errors import TicketInvalid
from kvxfer.instances import Role
from kvxfer.kv.messages import Hello
from kvxfer.model_identity import ModelIdentity
from kvxfer.ticket import Ticket, TicketKeys, as_ticket_keys, verify_ticket
from kvxfer.watched_file import WatchedFile

Side: TypeAlias = Literal[Role.PREFILL, Role.DECODE]


class Identity:
    """Loop only. `epoch` changes with each new registration, `model` with an update of weights."""

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        ticket_key: bytes | str | WatchedFile[TicketKeys],
        clock: Clock,
        model: ModelIdentity | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.model = model
        self._epochs = [epoch]
        self._clock = clock
        self._key = (
            ticket_key if isinstance(ticket_key, WatchedFile) else as_cluster_key(ticket_key)
        )

    @property
    def epoch(self) -> int:
        return self._epochs[-1]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epochs.append(epoch)

    @property
    def keys(self) -> TicketKeys:
        """The cluster's ticket keys as they are now."""
        if isinstance(self._key, WatchedFile):
            return self._key.current
        return as_ticket_keys(self._key)

    def verify(self, token: str) -> Ticket:
        """Raises TicketInvalid and TicketExpired."""
        return verify_ticket(token, self.keys, now=self._clock.unix())

    def side(self, ticket: Ticket) -> Role | None:
        """The side that a ticket gives to this instance; None where it names others."""
        if self._is(ticket, Role.PREFILL):
            return Role.PREFILL
        return Role.DECODE if self._is(ticket, Role.DECODE) else None

    def require(self, ticket: Ticket, side: Side) -> None:
        """Raises TicketInvalid where the ticket names another instance or epoch for `side`."""
        if not self._is(ticket, side):
            raise _names(ticket, side, f"this is {self.instance_id!r} of epoch {self.epoch}")

    def _is(self, ticket: Ticket, side: Side) -> bool:
        if not ticket.bearer:
            return named(ticket, side) == (self.instance_id, self.epoch)
        # Signed by prefill itself: what it keeps outlives its registration, not its process.
        own = ticket.prefill_id == self.instance_id and ticket.prefill_epoch in self._epochs
        return own is (side is Role.PREFILL)


def require_peer(ticket: Ticket, side: Side, hello: Hello, where: str) -> None:
    """Raises TicketInvalid where the peer that said `hello` is not what the ticket names."""
    if ticket.bearer:
        # Which of its epochs are of the same process, prefill alone knows.
        fits = side is Role.DECODE or ticket.prefill_id == hello.instance_id
    else:
        fits = named(ticket, side) == (hello.instance_id, hello.epoch)
    if not fits:
        raise _names(ticket, side, f"{where} {hello.instance_id!r} of epoch {hello.epoch}")


def named(ticket: Ticket, side: Side) -> tuple[str, int]:
    """Instance id and epoch of one side."""
    if side is Role.PREFILL:
        return ticket.prefill_id, ticket.prefill_epoch
    return ticket.decode_id, ticket.decode_epoch


def _names(ticket: Ticket, side: Side, found: str) -> TicketInvalid:
    instance_id, epoch = named(ticket, side)
    return TicketInvalid(
        f"the ticket of transfer {ticket.transfer_id} names {side} worker {instance_id!r} of epoch "
        f"{epoch}, {found}; ask for a new ticket"
    )
