"""The decode side of one transfer: offers blocks, counts arrivals, hands the blocks over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kvxfer.clock import Clock
from kvxfer.errors import (
    BlockStateError,
    KvxferError,
    LeaseExpired,
    ProtocolError,
    TransferCancelled,
)
from kvxfer.kv.block_pool import BlockState
from kvxfer.kv.blocks import by_group, pack_block_table
from kvxfer.kv.checksum import verify
from kvxfer.kv.messages import Offer
from kvxfer.kv.ranks import targets
from kvxfer.kv.session_state import DecodeEvent, DecodeState, Lease, when_done, why_left

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvxfer.kv.blocks import HeldBlocks, TargetBlocks
    from kvxfer.kv.cache import KvCache
    from kvxfer.kv.inbound import Inbound
    from kvxfer.ticket import Ticket
    from kvxfer.tracing.span import Span

logger = logging.getLogger(__name__)

_PROGRESS: Final = tuple(DecodeState)
_EXPECTED: Final = {
    DecodeState.OFFERED: "take up the offer",
    DecodeState.RECEIVING: "send every layer",
    DecodeState.COUNTING: "deliver every write it announced",
}


class DecodeSession:
    """Blocks that are offered to the prefill ranks that have a part of them. Loop only.

    An async context manager: leaving it gives the blocks back unless take() has handed them over.
    The blocks are complete when each of the ranks has sent its part. If one fails, the transfer
    fails and the others are told. Made by KvEndpoint.decode_session().
    """

    def __init__(
        self,
        ticket: Ticket,
        cache: KvCache,
        blocks: TargetBlocks,
        inbounds: Sequence[Inbound],
        first_block: int,
        lease_seconds: float,
        ended: Callable[[DecodeSession], None],
        span: Span | None = None,
        *,
        adapter: str = "",
        clock: Clock,
    ) -> None:
        self.transfer_id = ticket.transfer_id
        self.request_id = ticket.request_id
        self.begun = clock.monotonic()
        self.checked_bytes = 0
        """Bytes that were compared with their checksum."""
        self.ticket = ticket
        self._cache = cache
        self._blocks = blocks
        self._first_block = first_block
        self._adapter = adapter
        self._table = pack_block_table(blocks.ids)
        # The number of blocks that come, by KV cache group.
        self._present = (by_group(blocks.ids, cache.layout) >= 0).sum(axis=1).tolist()
        self._inbounds = tuple(inbounds)
        self._ended = ended
        self._span = span
        self._error: KvxferError | None = None
        self._still_writing = len(self._inbounds)
        loop = asyncio.get_running_loop()
        # Done when the blocks of a failed transfer are free.
        self._freed: asyncio.Future[None] = loop.create_future()
        self._arranging: asyncio.Future[None] | None = None
        self._tail: asyncio.Future[bytes] = loop.create_future()
        # If it is not awaited, a failure is not an unhandled error.
        self._tail.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._lease = Lease(lease_seconds, self._lease_over, clock)
        for inbound in self._inbounds:
            inbound.begin(self)

    @property
    def state(self) -> DecodeState:
        """The earliest of the states with each prefill rank."""
        return min((inbound.state for inbound in self._inbounds), key=_PROGRESS.index)

    @property
    def error(self) -> KvxferError | None:
        """The error of the transfer, if it has failed."""
        return self._error

    @property
    def fabric(self) -> str:
        """The fabric over which the blocks come."""
        return self._inbounds[0].connection.peer.fabric

    @property
    def nbytes(self) -> int:
        """Bytes that are written into the blocks if prefill fills all of them."""
        layout = self._cache.layout
        sizes = [layer.block_size for layer in layout.of_layers]
        plans = [inbound.connection.inbound_plan for inbound in self._inbounds]
        return sum(
            self._present[layout.group_of(layer.dst_layer)]
            * layer.bytes_per_cycle
            * sizes[layer.dst_layer]
            // layer.cycle_tokens
            for plan in plans
            for layer in plan.layers
        )

    @property
    def _is_of_several(self) -> bool:
        """Whether other ranks of decode take part in the transfer."""
        ours = self._cache.layout
        return any(len(targets(one.connection.hello.layout, ours)) > 1 for one in self._inbounds)

    @property
    def lease_remaining(self) -> float:
        """Seconds until the lease ends the transfer."""
        return self._lease.remaining()

    def _message(self) -> Offer:
        """Returns the OFFER of the blocks to the only prefill rank that they come from."""
        [inbound] = self._inbounds
        return self._offer_to(inbound)

    def _offer(self) -> None:
        """Sends an OFFER to each prefill rank. Raises EngineError; the caller then cancels."""
        for inbound in self._inbounds:
            inbound.connection.send(self._offer_to(inbound))

    async def wait(self) -> bytes:
        """Waits until every byte has arrived, and returns the tail that prefill sent with DONE.

        With several prefill ranks it is the tail of the last one that sent any. Ends with the lease
        at the latest. Raises TransferRefused, TicketInvalid or TicketExpired (prefill refuses),
        TransferCancelled, LeaseExpired, PeerLost or PeerTimeout; the blocks are then already free.
        Cancelling the waiting task leaves the transfer as it is.
        """
        return await asyncio.shield(self._tail)

    def take(self) -> HeldBlocks:
        """Hands the complete blocks over, once, and ends the session.

        Raises BlockStateError before wait() has returned and the second time, and the transfer's
        error if it failed.
        """
        if self._error is not None:
            raise self._error
        if self.state is DecodeState.TAKEN:
            raise BlockStateError(
                self._says("its blocks were taken before; use what the first take() returned")
            )
        state = self._blocks.block_state()
        if state is not BlockState.COMPLETE:
            raise BlockStateError(
                self._says(f"its blocks are {state.name.lower()}; take() them after wait()")
            )
        hold = self._blocks.take()
        for inbound in self._inbounds:
            inbound.taken()
        return hold

    def cancel(self, reason: str) -> asyncio.Future[None]:
        """Cancels the transfer now; `await` the result to wait until the blocks are free. May be
        called any number of times; does nothing after take()."""
        error = TransferCancelled(self._says(f"cancelled here: {reason}"))
        self._give_up(DecodeEvent.ABORT, error, reason)
        return when_done(self._tail if self._error is None else self._freed)

    def _fail(self, error: KvxferError) -> None:
        """Fails the transfer for a reason that was found here."""
        self._give_up(DecodeEvent.ABORT, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cancel(why_left(error))

    # Called by the inbounds.

    def _accepted(self) -> None:
        """Notes that a prefill rank may write into the blocks now."""
        if self._blocks.block_state() is BlockState.OFFERED:
            self._blocks.receive()
            self._happened("accepted")

    def _counted(self) -> None:
        """Notes that a prefill rank's part has arrived; the last part completes the blocks."""
        if any(inbound.state is not DecodeState.COMPLETE for inbound in self._inbounds):
            return
        self._happened("every byte is there")
        connections = [inbound.connection for inbound in self._inbounds]
        if not self._permutes and not any(connection.checksums for connection in connections):
            self._complete()
            return
        self._arranging = asyncio.get_running_loop().run_in_executor(None, self._arrange)
        self._arranging.add_done_callback(self._arranged)

    def _give_up(
        self,
        event: DecodeEvent,
        error: KvxferError,
        reason: str = "",
        *,
        of: Inbound | None = None,
    ) -> None:
        """Ends the transfer with an error, because of one prefill rank or for all of them at once.

        Does nothing if the state does not allow the event. The blocks go back to the pool only when
        nothing can be written into them. `reason` is what prefill is told; if it is empty, the
        error itself.
        """
        hit = self._inbounds if of is None else (of,)
        if self._error is None and any(inbound.fails_by(event) for inbound in hit):
            self._error = error
            logger.info("%s", error)
        for inbound in hit:
            inbound.give_up(event, reason or str(error))
        if self._error is not None and of is not None:
            for inbound in self._inbounds:
                inbound.give_up(DecodeEvent.ABORT, str(error))

    def _revoked(self) -> None:
        """Notes that no write of one of the prefill ranks can land any more."""
        self._still_writing -= 1
        self._release_if_nobody_writes()

    def _inbound_ended(self) -> None:
        if all(inbound.ended for inbound in self._inbounds):
            self._lease.end()
            self._end_if_over()

    def _end_if_over(self) -> None:
        """Reports the end of the session once all inbounds have ended and, if it failed, its blocks
        are free."""
        gone = self._error is None or self._freed.done()
        if gone and all(inbound.ended for inbound in self._inbounds):
            self._ended(self)
            if self._span is not None:
                self._span.set(fabric=self.fabric, bytes=self.nbytes)
                self._span.end(self._error)

    def _happened(self, what: str) -> None:
        if self._span is not None:
            self._span.event(what)

    def _lease_over(self) -> None:
        late = next((i for i in self._inbounds if i.state in _EXPECTED), None)
        if late is not None:
            what = f"{late.peer_name} did not {_EXPECTED[late.state]}"
        elif self._arranging is not None and not self._arranging.done():
            what = "the blocks were not checked and put in order"
        else:
            what = "prefill did not take the blocks"
        what = f"{what} within {self._lease.seconds:g} s"
        self._give_up(DecodeEvent.LEASE_OVER, LeaseExpired(self._says(what)), what)

    @property
    def _permutes(self) -> bool:
        plan = self._inbounds[0].connection.inbound_plan  # the order of arrival is the same for all
        return self._cache.permute is not None and plan.permutes

    def _arrange(self) -> None:
        """Checks the blocks and puts their heads in order, in a separate thread. Nothing writes
        into the blocks any more, and they are not given back before it returns."""
        for inbound in self._inbounds:
            if inbound.connection.checksums and inbound.connection.inbound_plan.layers:
                self.checked_bytes += verify(
                    inbound.checksum,
                    inbound.connection,
                    self._cache,
                    self._blocks.ids,
                    self._first_block,
                )
        if self._permutes and self._cache.permute is not None:
            order = self._inbounds[0].connection.inbound_plan.arrival_order
            self._cache.permute(self._cache, self._blocks.ids, order)

    def _arranged(self, arranging: asyncio.Future[None]) -> None:
        problem = arranging.exception()
        if self._error is not None:
            self._release_if_nobody_writes()
        elif isinstance(problem, KvxferError):
            self._fail(type(problem)(self._says(str(problem))))
        elif problem is not None:
            what = f"its blocks could not be checked and put in order: {problem!r}"
            self._fail(ProtocolError(self._says(what)))
        else:
            self._complete()

    def _complete(self) -> None:
        self._blocks.complete()
        self._happened("complete")
        tails = [inbound.tail for inbound in self._inbounds if inbound.tail]
        self._tail.set_result(tails[-1] if tails else b"")

    def _release_if_nobody_writes(self) -> None:
        """Gives the blocks of a failed transfer back once nothing writes into them."""
        arranging = self._arranging is not None and not self._arranging.done()
        if self._still_writing or arranging or self._freed.done():
            return
        self._blocks.release()
        if not self._tail.done() and self._error is not None:
            self._tail.set_exception(self._error)
        self._freed.set_result(None)
        self._end_if_over()

    def _offer_to(self, inbound: Inbound) -> Offer:
        return Offer(
            transfer_id=self.transfer_id,
            ticket=self.ticket.token,
            blocks=self._table,
            grants=inbound.grants,
            imm=inbound.counter.imm,
            lease_seconds=self._lease.seconds,
            first_block=self._first_block,
            adapter=self._adapter or msgspec.UNSET,
        )

    def _says(self, what: str) -> str:
        return f"transfer {self.transfer_id}: {what}"
