"""The decode side of one transfer: offers blocks, counts what arrives, hands the blocks over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvxfer.errors import (
    DeadlineExceeded,
    EngineError,
    KvxferError,
    LeaseExpired,
    ProtocolError,
    StaleCounter,
    TransferCancelled,
)
from kvxfer.kv.block_ids import pack_block_table
from kvxfer.kv.lease import Lease
from kvxfer.kv.messages import Cancel, Done, Offer
from kvxfer.kv.session_state import (
    DECODE_TRANSITIONS,
    DecodeEvent,
    DecodeState,
    StateMachine,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvxfer.engine import Counter
    from kvxfer.kv.block_pool import BlockHold, BlockLease
    from kvxfer.kv.pair import KvPair
    from kvxfer.ticket import Ticket

logger = logging.getLogger(__name__)

_ENDED = frozenset({DecodeState.TAKEN, DecodeState.CANCELLED, DecodeState.FAILED})
_EXPECTED = {
    DecodeState.OFFERED: "take up the offer",
    DecodeState.RECEIVING: "send every layer",
    DecodeState.COUNTING: "deliver every write it announced",
}


class DecodeSession:
    """Blocks under offer to one prefill worker. Loop only.

    An async context manager: leaving it gives the blocks back unless take() has handed them over.
    Made by KvEndpoint.decode_session().
    """

    def __init__(
        self,
        ticket: Ticket,
        token: str,
        pair: KvPair,
        blocks: BlockLease,
        counter: Counter,
        grants: Sequence[bytes],
        lease_seconds: float,
        ended: Callable[[DecodeSession], None],
    ) -> None:
        self.transfer_id = ticket.transfer_id
        self.request_id = ticket.request_id
        self.nbytes = len(blocks) * pair.inbound_plan.bytes_per_block
        self._peer_name = f"prefill worker {ticket.prefill_id!r}"
        self._token = token
        self.pair = pair
        self._blocks = blocks
        self._counter = counter
        self._grants = tuple(grants)
        self._ended = ended
        self._machine = StateMachine(
            f"transfer {ticket.transfer_id} with {self._peer_name}",
            DECODE_TRANSITIONS,
            DecodeState.OFFERED,
        )
        self._error: KvxferError | None = None
        self._freed = asyncio.Event()  # the blocks of a transfer that failed
        self._counting: asyncio.Task[None] | None = None
        self._tail: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        # A failure that nobody waits for is no unhandled error.
        self._tail.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._lease = Lease(lease_seconds, self._lease_over)

    @property
    def state(self) -> DecodeState:
        return self._machine.state

    @property
    def fabric(self) -> str:
        """Which fabric the blocks come over."""
        return self.pair.peer.fabric

    @property
    def lease_remaining(self) -> float:
        """Seconds until the transfer ends."""
        return self._lease.remaining()

    def message(self) -> Offer:
        """The OFFER of the blocks."""
        return Offer(
            transfer_id=self.transfer_id,
            ticket=self._token,
            blocks=pack_block_table(self._blocks.ids),
            grants=self._grants,
            imm=self._counter.imm,
            lease_seconds=self._lease.seconds,
        )

    def offer(self) -> None:
        """Sends the OFFER. Raises EngineError; the caller then cancels."""
        self.pair.send(self.message())

    async def wait(self) -> bytes:
        """Waits until every byte is there and returns the tail that prefill sent with DONE.

        Ends with the lease at the latest. Raises TransferRefused, TicketInvalid or TicketExpired
        (prefill refuses), TransferCancelled, LeaseExpired, PeerLost or PeerTimeout; the blocks are
        free by then. Cancelling the task that waits leaves the transfer as it is.
        """
        return await asyncio.shield(self._tail)

    def take(self) -> BlockHold:
        """Hands the complete blocks over; the session has ended then.

        Raises BlockStateError before wait() has returned, and the transfer's error if it failed.
        """
        if self._error is not None:
            raise self._error
        hold = self._blocks.take()
        self._machine.advance(DecodeEvent.TAKE)
        self._end()
        return hold

    async def cancel(self, reason: str) -> None:
        """Gives the transfer up; the blocks are free when this returns. Any number of times."""
        error = TransferCancelled(self._says(f"cancelled here: {reason}"))
        self._give_up(DecodeEvent.ABORT, error, reason)
        if self._error is not None:
            await self._freed.wait()

    def fail(self, error: KvxferError) -> None:
        """Gives the transfer up for a reason that was found here."""
        self._give_up(DecodeEvent.ABORT, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cancel("its session was left" if error is None else repr(error))

    # What the endpoint hears from prefill.

    def accepted(self) -> None:
        if self._machine.advance(DecodeEvent.ACCEPTED) is DecodeState.RECEIVING:
            self._blocks.receive()

    def done(self, done: Done) -> None:
        if self._machine.advance(DecodeEvent.DONE) is not DecodeState.COUNTING:
            return
        if done.total < 1:
            raise ProtocolError(self._says(f"DONE announces {done.total} writes"))
        self._counting = asyncio.get_running_loop().create_task(self._count(done.total, done.tail))

    def refused(self, error: KvxferError) -> None:
        self._give_up(DecodeEvent.REFUSED, error)

    def cancelled_by_peer(self, reason: str) -> None:
        error = TransferCancelled(self._says(f"cancelled by {self._peer_name}: {reason}"))
        self._give_up(DecodeEvent.PEER_CANCEL, error)

    def cancel_answered(self) -> None:
        self._give_up(DecodeEvent.PEER_CANCELLED, TransferCancelled(self._says("cancelled")))

    def peer_lost(self, error: KvxferError) -> None:
        self._give_up(DecodeEvent.PEER_LOST, error)

    async def _count(self, total: int, tail: bytes) -> None:
        try:
            await self._counter.wait(total, self._lease.remaining())
        except StaleCounter:
            return  # revoked here, by whoever gave the transfer up
        except DeadlineExceeded:
            self._lease_over()
        except EngineError as error:
            self.fail(error)
        else:
            self._complete(total, tail)

    def _complete(self, total: int, tail: bytes) -> None:
        if not self._machine.allows(DecodeEvent.COUNTED):
            return
        arrived = self._counter.value
        if arrived != total:
            problem = f"{arrived} writes arrived, {self._peer_name} announced {total}"
            self.fail(ProtocolError(self._says(problem)))
            return
        self._counter.release()  # afterwards no write of this transfer can land
        self._blocks.complete()
        self._machine.advance(DecodeEvent.COUNTED)
        self._tail.set_result(tail)

    def _lease_over(self) -> None:
        doing = _EXPECTED.get(self.state)
        what = f"{self._peer_name} did not {doing}" if doing else "nobody took the blocks"
        what = f"{what} within {self._lease.seconds:g} s"
        self._give_up(DecodeEvent.LEASE_OVER, LeaseExpired(self._says(what)), what)

    def _give_up(self, event: DecodeEvent, error: KvxferError, reason: str = "") -> None:
        """Ends the transfer with an error. Does nothing where the state does not allow the event.

        Nothing can be written into the blocks from the moment they go back to the pool. `reason`
        is what prefill is told, the error itself where it is empty.
        """
        if not self._machine.allows(event):
            return
        before, after = self.state, self._machine.advance(event)
        if after is before:
            return
        if before is not DecodeState.CANCELLING:
            self._error = error
            logger.info("%s", error)
            if after is DecodeState.CANCELLING:
                # First, so that prefill hears the reason before its writes are refused.
                with contextlib.suppress(EngineError):
                    self.pair.send(Cancel(self.transfer_id, reason or str(error)))
            self._counter.revoke(self._revoked)
        if after in _ENDED:
            self._end()

    def _revoked(self) -> None:
        """No write of this transfer can land any more."""
        self._blocks.release()
        if not self._tail.done() and self._error is not None:
            self._tail.set_exception(self._error)
        self._freed.set()

    def _end(self) -> None:
        self._lease.end()
        self._ended(self)

    def _says(self, what: str) -> str:
        return f"transfer {self.transfer_id}: {what}"
