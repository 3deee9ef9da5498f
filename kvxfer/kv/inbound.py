"""One prefill rank's part of a decode session: its answer to the OFFER, its count, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvxfer.errors import (
    DeadlineExceeded,
    EngineError,
    KvxferError,
    ProtocolError,
    StaleCounter,
    TransferCancelled,
)
from kvxfer.kv.messages import Cancel, Done
from kvxfer.kv.session_state import (
    DECODE_TRANSITIONS,
    DecodeEvent,
    DecodeState,
    StateMachine,
)

if TYPE_CHECKING:
    from kvxfer.engine import Counter
    from kvxfer.kv.connection import Connection
    from kvxfer.kv.messages import Checksum
    from kvxfer.ticket import Ticket

ENDED: Final = frozenset({DecodeState.TAKEN, DecodeState.CANCELLED, DecodeState.FAILED})


class Receiving(Protocol):
    """The decode session that the writes of one or several prefill ranks are for."""

    ticket: Ticket

    @property
    def _is_of_several(self) -> bool: ...

    @property
    def lease_remaining(self) -> float: ...

    def _accepted(self) -> None: ...

    def _counted(self) -> None: ...

    def _revoked(self) -> None: ...

    def _inbound_ended(self) -> None: ...

    def _fail(self, error: KvxferError) -> None: ...

    def _give_up(self, event: DecodeEvent, error: KvxferError, *, of: Inbound) -> None: ...


class Inbound:
    """The states of a transfer between one prefill rank and one decode rank. Loop only.

    Made by KvEndpoint for each prefill rank that the session's blocks come from. It tells the
    session everything that concerns the other ranks too.
    """

    def __init__(
        self, connection: Connection, transfer_id: str, counter: Counter, grants: Sequence[bytes]
    ) -> None:
        hello = connection.hello
        rank = f"rank {hello.layout.rank} of " if hello.layout.num_ranks > 1 else ""
        self.connection = connection
        self.counter = counter
        self.grants = tuple(grants)
        self.peer_name = f"{rank}prefill worker {hello.instance_id!r}"
        self.tail = b""
        self.checksum: Checksum | None = None
        self.answered = False
        """True if prefill is known to have the OFFER."""
        self._transfer_id = transfer_id
        self._machine = StateMachine(
            f"transfer {transfer_id} with {self.peer_name}",
            DECODE_TRANSITIONS,
            DecodeState.OFFERED,
        )
        self._session: Receiving
        self._counting: asyncio.Task[None] | None = None

    def begin(self, session: Receiving) -> None:
        """Tells the session what the prefill rank does from now on."""
        self._session = session
        self.connection.decodes[self._transfer_id] = self

    @property
    def state(self) -> DecodeState:
        return self._machine.state

    @property
    def ticket(self) -> Ticket:
        """The ticket of the OFFER."""
        return self._session.ticket

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    # Called for prefill's messages and losses.

    def accepted(self) -> None:
        self.answered = True
        if self._machine.advance(DecodeEvent.ACCEPTED) is DecodeState.RECEIVING:
            self._session._accepted()

    def done(self, done: Done) -> None:
        if self._machine.advance(DecodeEvent.DONE) is not DecodeState.COUNTING:
            return
        if (done.total < 1) is bool(self.connection.inbound_plan.layers):
            raise ProtocolError(self._says(f"DONE announces {done.total} immediates"))
        self.tail = done.tail
        self.checksum = done.checksum
        self._counting = asyncio.get_running_loop().create_task(self._count(done.total))

    def refused(self, error: KvxferError) -> None:
        self._session._give_up(DecodeEvent.REFUSED, error, of=self)

    def cancelled_by_peer(self, reason: str) -> None:
        error = TransferCancelled(self._says(f"cancelled by {self.peer_name}: {reason}"))
        self._session._give_up(DecodeEvent.PEER_CANCEL, error, of=self)

    def cancel_answered(self) -> None:
        error = TransferCancelled(self._says("cancelled"))
        self._session._give_up(DecodeEvent.PEER_CANCELLED, error, of=self)

    def peer_lost(self, error: KvxferError) -> None:
        self._session._give_up(DecodeEvent.PEER_LOST, error, of=self)

    # Called by the session.

    def taken(self) -> None:
        self._machine.advance(DecodeEvent.TAKE)
        self._end()

    def fails_by(self, event: DecodeEvent) -> bool:
        """Whether the event ends the transfer, which has not failed yet."""
        state = self.state
        return (
            state is not DecodeState.CANCELLING
            and self._machine.allows(event)
            and DECODE_TRANSITIONS[state, event] is not state
        )

    def give_up(self, event: DecodeEvent, reason: str) -> None:
        """Ends this part of a failed transfer; prefill is told the reason if it still takes part.
        Does nothing if the state does not allow the event."""
        if not self._machine.allows(event):
            return
        failing = self.fails_by(event)
        complete = self.state is DecodeState.COMPLETE
        after = self._machine.advance(event)
        if failing:
            # If this rank is complete, prefill may still wait for the offers of the others.
            if after is DecodeState.CANCELLING or (complete and self._session._is_of_several):
                # First, so that prefill knows the reason before its writes are refused.
                with contextlib.suppress(EngineError):
                    self.connection.send(Cancel(self._transfer_id, reason))
            self.counter.revoke(self._session._revoked)
        if after in ENDED:
            self._end()

    async def _count(self, total: int) -> None:
        try:
            # Also for a total of 0: a counter that has reached its total is released at once.
            await self.counter.wait(total, self._session.lease_remaining)
        except StaleCounter:
            return  # revoked here, when the transfer was given up
        except DeadlineExceeded:
            return  # the lease ends at the same time and reports it
        except EngineError as error:
            self._session._fail(error)
        else:
            self._complete(total)

    def _complete(self, total: int) -> None:
        if not self._machine.allows(DecodeEvent.COUNTED):
            return
        arrived = self.counter.value
        if arrived != total:
            problem = f"{arrived} immediates arrived, {self.peer_name} announced {total}"
            self._session._fail(ProtocolError(self._says(problem)))
            return
        self.counter.release()  # afterwards no write of this rank can land
        self._machine.advance(DecodeEvent.COUNTED)
        self._session._counted()

    def _end(self) -> None:
        self.connection.decodes.pop(self._transfer_id, None)
        self._session._inbound_ended()

    def _says(self, what: str) -> str:
        return f"transfer {self._transfer_id}: {what}"
