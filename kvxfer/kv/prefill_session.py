"""The prefill side of one transfer: writes the layers from blocks that stay pinned meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvxfer.clock import Clock
from kvxfer.errors import (
    EngineError,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    LeaseExpired,
    MessageTooLarge,
    PeerError,
    StaleCounter,
    TransferCancelled,
)
from kvxfer.instances import Role
from kvxfer.kv.admission import named
from kvxfer.kv.blocks import by_group
from kvxfer.kv.messages import MAX_TAIL_BYTES, Cancel, Cancelled, Offer
from kvxfer.kv.outbound import Outbound, SendSpans
from kvxfer.kv.plan import blocks_match
from kvxfer.kv.ranks import targets
from kvxfer.kv.session_state import (
    PREFILL_TRANSITIONS,
    Lease,
    PrefillEvent,
    PrefillState,
    StateMachine,
    when_done,
    why_left,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvxfer.engine import Operation, WatchFor
    from kvxfer.kv.block_pool import BlockIds
    from kvxfer.kv.blocks import SourceBlocks
    from kvxfer.kv.connection import Connection
    from kvxfer.layout import KvLayout
    from kvxfer.ticket import Ticket
    from kvxfer.tracing.span import Span

logger = logging.getLogger(__name__)

# A refused write or an error of the peer may come before the CANCEL or the loss that explains it.
_SYMPTOMS = (StaleCounter, PeerError)
_CAUSE_SECONDS = 0.5
_BACKPRESSURE_SECONDS = 0.005


class PrefillSession:
    """Blocks of one request on their way to one decode worker, to each of its ranks that has a part
    of them. If one rank fails, the transfer fails and the others are told.

    Any thread may call write_layer(); everything else is for the endpoint's loop. An async context
    manager: leaving it before finish() has returned cancels the transfer. Made by
    KvEndpoint.prefill_session(). The blocks stay pinned until nothing of them is under way.
    """

    def __init__(
        self,
        ticket: Ticket,
        blocks: SourceBlocks,
        layout: KvLayout,
        lease_seconds: float,
        ended: Callable[[PrefillSession], None],
        span: Span | None = None,
        *,
        adapter: str = "",
        clock: Clock,
    ) -> None:
        self.transfer_id = ticket.transfer_id
        self.request_id = ticket.request_id
        self.begun = clock.monotonic()
        self._adapter = adapter
        self.decode = named(ticket, Role.DECODE)
        self._peer_name = (
            "the decode worker with its ticket"
            if ticket.bearer
            else f"decode worker {ticket.decode_id!r}"
        )
        self._layout = layout
        self._num_layers = layout.layers_per_rank
        self._loop = asyncio.get_running_loop()
        # Guards everything below against write_layer() in other threads.
        self._lock = threading.Lock()
        self._machine = StateMachine(
            f"transfer {ticket.transfer_id} with {self._peer_name}",
            PREFILL_TRANSITIONS,
            PrefillState.WAITING,
        )
        # Decode's connected ranks, whether or not their OFFERs have come.
        self._connections: dict[int, Connection] = {}  # by decode rank
        self._outbounds: dict[int, Outbound] = {}
        # Decode ranks whose OFFER has not come; None until the first one shows how many there are.
        self._awaited: set[int] | None = None
        self._written: dict[int, int] = {}  # blocks by layer, in the order of the layers
        self._after: dict[int, WatchFor | None] = {}  # reached when the last of them are computed
        self._tail: bytes | None = None
        self._error: KvxferError | None = None
        self._reason = ""
        # Set when a decode rank has cancelled the transfer or is lost; and which of these it was.
        self._end_heard = asyncio.Event()
        self._ends_heard: dict[Connection, PrefillEvent] = {}
        self._settling: asyncio.Task[None] | None = None
        self._on_end = ended
        self._spans = None if span is None else SendSpans(span, clock)
        self._ended: asyncio.Future[None] = self._loop.create_future()
        # If it is not awaited, a failure is not an unhandled error.
        self._ended.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._lease = Lease(lease_seconds, self._lease_over, clock)
        try:
            self._blocks = by_group(blocks.ids, layout)
            self._num_blocks = self._blocks.shape[1]
            self._pin = blocks.pin(f"transfer {ticket.transfer_id}")
        except BaseException:
            self._lease.end()
            raise

    @property
    def state(self) -> PrefillState:
        return self._machine.state

    @property
    def error(self) -> KvxferError | None:
        """The error of the transfer, if it has failed."""
        return self._error

    @property
    def _met(self) -> tuple[Connection, ...]:
        """The connections to decode's ranks, as far as they are known."""
        return tuple(self._connections.values())

    @property
    def lease_remaining(self) -> float:
        """Seconds until the lease ends the transfer, as far as this side knows."""
        return self._lease.remaining()

    @property
    def fabric(self) -> str | None:
        """The fabric over which the blocks go; None until the OFFER has come."""
        return next((out.connection.peer.fabric for out in self._outbounds.values()), None)

    @property
    def nbytes(self) -> int:
        """Bytes posted so far."""
        with self._lock:
            return sum(operation.nbytes for operation in self._operations())

    @property
    def writes(self) -> int:
        """Writes posted so far, after coalescing."""
        with self._lock:
            return sum(operation.writes for operation in self._operations())

    def _delivered(self) -> Iterator[tuple[str, str, int]]:
        """Yields for each decode rank its instance, the fabric, and the bytes delivered so far."""
        for outbound in self._outbounds.values():
            ended = [each for each in list(outbound.operations) if each.done()]
            nbytes = sum(each.nbytes for each in ended if each.error is None)
            yield outbound.connection.hello.instance_id, outbound.connection.peer.fabric, nbytes

    def write_layer(
        self, layer: int, until: int | None = None, *, after: WatchFor | None = None
    ) -> None:
        """Sends a layer whose K and V are computed, or will be when `after` is reached. Before the
        OFFER has come, the layer is kept.

        A prompt that is computed in chunks is sent block by block: `until` is the number of its
        first blocks that are complete; those that were not sent before are sent. Without it all
        are.

        Returns when the writes are posted, or queued if the engine has too many. Raises
        InvalidArgument for a layer that does not exist or was already written up to there, and the
        transfer's error if it has failed.
        """
        end = self._num_blocks if until is None else until
        try:
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._check_layer(layer, end)
                some = range(self._written.get(layer, 0), end)
                self._written[layer] = end
                self._after[layer] = after
                for outbound in self._outbounds.values():
                    outbound.add(layer, some, after)
                self._post()
        except EngineError as error:
            self._give_up(PrefillEvent.ABORT, error)
            raise

    async def finish(self, tail: bytes = b"") -> None:
        """Announces the end, and waits until every write is delivered.

        `tail` goes to the decode worker with it, for example the first token: at most
        MAX_TAIL_BYTES. When this returns the blocks may be reused. Raises InvalidArgument if a
        layer was not written, MessageTooLarge, and as the transfer's error TransferCancelled,
        LeaseExpired, PeerLost or PeerTimeout. Cancelling the waiting task leaves the transfer as it
        is.
        """
        if len(tail) > MAX_TAIL_BYTES:
            raise MessageTooLarge(
                f"transfer {self.transfer_id}: a tail of {len(tail)} bytes; "
                f"send at most {MAX_TAIL_BYTES}"
            )
        try:
            with self._lock:
                if self._error is None and self._tail is None:
                    whole = self._num_blocks
                    layers = range(self._num_layers)
                    missing = [layer for layer in layers if self._written.get(layer) != whole]
                    if missing:
                        raise InvalidArgument(
                            f"transfer {self.transfer_id}: finish() before layer "
                            f"{', '.join(map(str, missing))}; write_layer() every layer first"
                        )
                    self._tail = tail
                    self._post()
        except EngineError as error:
            self._give_up(PrefillEvent.ABORT, error)
        await self.wait()

    async def wait(self) -> None:
        """Waits until every write is delivered. Raises the transfer's error as soon as it fails.

        finish() waits for the same. An engine that still computes may wait here to learn of a
        failure. Nothing of the blocks is under way when this returns or raises.
        """
        await asyncio.shield(self._ended)

    def cancel(self, reason: str) -> asyncio.Future[None]:
        """Cancels the transfer now; `await` the result to wait until nothing of it is under way.
        May be called any number of times; does nothing after finish() has returned."""
        error = TransferCancelled(self._says(f"cancelled here: {reason}"))
        self._give_up(PrefillEvent.ABORT, error, reason)
        return when_done(self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cancel(why_left(error))

    # Called for decode's messages and losses.

    def _meet(self, connection: Connection) -> None:
        """Notes a connected decode rank; from now on each side is told of the other's end."""
        self._connections[connection.hello.layout.rank] = connection

    def _awaits(self, connection: Connection) -> bool:
        """Whether nothing has come yet from the decode rank of a connection."""
        return (
            self.decode == connection.named
            and connection.hello.layout.rank not in self._connections
        )

    def _offer_refused(self, connection: Connection, error: KvxferError) -> None:
        """Fails the transfer if the refused OFFER is from an awaited decode rank: no other will
        come."""
        if self.decode == connection.named and connection.hello.layout.rank not in self._outbounds:
            self._fail(error)

    def _keep(self, connection: Connection, lease_seconds: float) -> None:
        """Extends the lease, in which the OFFER has to come, to at least `lease_seconds` from now.
        Raises InvalidArgument."""
        if self._machine.state is PrefillState.WAITING and self._awaited is None:
            self._lease.renew(max(lease_seconds, self._lease.remaining()))
            self._meet(connection)

    def _accept(
        self,
        connection: Connection,
        offer: Offer,
        blocks: BlockIds,
        lease_seconds: float,
    ) -> None:
        """Accepts an OFFER and sends the layers that are already written.

        From now on the transfer has the lease that decode gives it. Raises InvalidArgument if the
        block tables cannot be of the same prompt or the rank has offered before, and LayoutMismatch
        if decode computes with another adapter; then nothing was sent.
        """
        adapter = offer.adapter or ""
        if connection.tells_adapters and adapter != self._adapter:
            raise LayoutMismatch("adapter", self._adapter, adapter)
        layout = connection.hello.layout
        self._check_offer(layout, offer.first_block, blocks.shape[1])
        outbound = Outbound(connection, offer, self._blocks, blocks, self._spans)
        if self._spans is not None:
            self._spans.accepted()
        self._lease.renew(lease_seconds)
        self._meet(connection)
        try:
            with self._lock:
                if self._awaited is None:
                    self._awaited = set(targets(self._layout, layout))
                self._awaited.discard(layout.rank)
                if not self._awaited:
                    self._machine.advance(PrefillEvent.OFFER)
                self._outbounds[layout.rank] = outbound
                outbound.accept()
                for layer, end in self._written.items():
                    outbound.add(layer, range(end), self._after[layer])
                self._post()
        except EngineError as error:
            self._give_up(PrefillEvent.ABORT, error)

    def _cancelled_by_peer(self, connection: Connection, reason: str) -> None:
        error = TransferCancelled(self._says(f"cancelled by {self._peer_name}: {reason}"))
        self._peer_left(connection, PrefillEvent.PEER_CANCEL, error)

    def _peer_lost(self, connection: Connection, error: KvxferError) -> None:
        self._peer_left(connection, PrefillEvent.PEER_LOST, error)

    def _fail(self, error: KvxferError) -> None:
        self._give_up(PrefillEvent.ABORT, error)

    def _check_layer(self, layer: int, end: int) -> None:
        if not 0 <= layer < self._num_layers:
            raise InvalidArgument(
                f"layer {layer} does not exist; this rank has 0 to {self._num_layers - 1}"
            )
        if end > self._num_blocks:
            raise InvalidArgument(
                f"layer {layer} until block {end}; the prompt has {self._num_blocks} blocks"
            )
        if end <= self._written.get(layer, 0):
            raise InvalidArgument(
                f"layer {layer} was written before; write each layer once, when it is computed"
            )

    def _check_offer(self, decode: KvLayout, first_block: int, num_blocks: int) -> None:
        if not blocks_match(self._layout, self._num_blocks, decode, first_block + num_blocks):
            after = f" after {first_block} that it has" if first_block else ""
            raise InvalidArgument(
                f"transfer {self.transfer_id}: {self._peer_name} offers {num_blocks} blocks{after} "
                f"for the {self._num_blocks} blocks of prefill ({decode.block_size} and "
                f"{self._layout.block_size} tokens each); use as many blocks as the prompt needs "
                "on both sides"
            )
        if decode.rank in self._outbounds or decode.rank not in targets(self._layout, decode):
            raise InvalidArgument(
                f"transfer {self.transfer_id}: rank {decode.rank} of {self._peer_name} has offered "
                f"its blocks before, or gets nothing from rank {self._layout.rank} of prefill; "
                "give each rank of decode a separate engine and endpoint"
            )

    def _operations(self) -> list[Operation]:
        return [operation for out in self._outbounds.values() for operation in out.operations]

    def _post(self) -> None:
        """Posts the queued writes, and DONE to each decode rank that has been sent everything."""
        # The lease ends first, and its error gives the reason.
        timeout = self._lease.remaining() + _CAUSE_SECONDS
        # One rank that has no room does not hold up the others.
        had_room = [outbound.post(timeout) for outbound in self._outbounds.values()]
        if not all(had_room):
            self._loop.call_soon_threadsafe(
                self._loop.call_later, _BACKPRESSURE_SECONDS, self._post_again
            )
        if self._tail is None:
            return
        for outbound in self._outbounds.values():
            if not outbound.waits and not outbound.announced:
                outbound.announce(self._tail)
        if self._machine.state is PrefillState.SENDING and all(
            outbound.announced for outbound in self._outbounds.values()
        ):
            self._machine.advance(PrefillEvent.FINISH)
            self._start_settling()

    def _post_again(self) -> None:
        try:
            with self._lock:
                if self._error is None:
                    self._post()
        except EngineError as error:
            self._give_up(PrefillEvent.ABORT, error)

    def _lease_over(self) -> None:
        if self._awaited is None:
            what = f"{self._peer_name} made no offer"
        elif self._awaited:
            missing = ", ".join(map(str, sorted(self._awaited)))
            what = f"{self._peer_name} made no offer for its ranks {missing}"
        elif self._tail is None:
            what = "the engine did not write every layer"
        else:
            what = f"{self._peer_name} did not take every write"
        what = f"{what} within {self._lease.seconds:g} s"
        self._give_up(PrefillEvent.LEASE_OVER, LeaseExpired(self._says(what)), what)

    def _give_up(self, event: PrefillEvent, error: KvxferError, reason: str = "") -> None:
        """Ends the transfer with an error. Does nothing if the state does not allow the event.

        Any thread. `reason` is what decode is told; if it is empty, the error itself.
        """
        with self._lock:
            if not self._machine.allows(event):
                return
            before, after = self._machine.state, self._machine.advance(event)
            if after is before:
                return
            self._error, self._reason = error, reason or str(error)
            logger.info("%s", error)
            for operation in self._operations():
                operation.cancel()
        self._loop.call_soon_threadsafe(self._start_settling)

    def _start_settling(self) -> None:
        if self._settling is None:
            self._settling = self._loop.create_task(self._settle())

    def _peer_left(self, connection: Connection, event: PrefillEvent, error: KvxferError) -> None:
        with self._lock:
            self._ends_heard[connection] = event
            if isinstance(self._error, _SYMPTOMS):
                self._error = error
        self._give_up(event, error)
        self._end_heard.set()

    async def _settle(self) -> None:
        """Waits until nothing is under way, then ends the transfer. Runs once per session."""
        for operation in self._operations():
            try:
                await operation
            except KvxferError as failure:
                self._give_up(PrefillEvent.ABORT, failure)
        if isinstance(self._error, _SYMPTOMS):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end_heard.wait(), _CAUSE_SECONDS)
        with self._lock:
            cause = self._error
            self._machine.advance(PrefillEvent.DRAINED if cause else PrefillEvent.DELIVERED)
        self._pin.release()
        self._lease.end()
        if cause is not None:
            self._tell_end()
        self._on_end(self)
        if self._spans is not None:
            self._spans.end(cause, self.fabric, self.nbytes)
        if cause is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(cause)

    def _tell_end(self) -> None:
        """Tells decode's ranks that nothing is under way any more."""
        for connection in self._connections.values():
            heard = self._ends_heard.get(connection)
            if heard is PrefillEvent.PEER_LOST:
                continue
            with contextlib.suppress(EngineError):
                connection.send(
                    Cancelled(self.transfer_id, self._delivered_to(connection))
                    if heard is PrefillEvent.PEER_CANCEL
                    else Cancel(self.transfer_id, self._reason)
                )

    def _delivered_to(self, connection: Connection) -> int:
        return sum(
            operation.immediates
            for outbound in self._outbounds.values()
            if outbound.connection is connection
            for operation in outbound.operations
            if operation.error is None
        )

    def _says(self, what: str) -> str:
        return f"transfer {self.transfer_id}: {what}"
