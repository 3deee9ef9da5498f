"""The writes of a prefill session to one decode rank: their target, the queued, the posted."""

from __future__ import annotations

import asyncio
import collections
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvxfer.clock import Clock, unix_ns
from kvxfer.errors import Backpressure, InvalidArgument, ProtocolError
from kvxfer.kv.checksum import RunningChecksum
from kvxfer.kv.messages import Accepted, Checksum, Done, Offer

if TYPE_CHECKING:
    from kvxfer.engine import Operation, WatchFor
    from kvxfer.errors import KvxferError
    from kvxfer.kv.block_pool import BlockIds
    from kvxfer.kv.connection import Connection
    from kvxfer.kv.plane_writes import Offsets, PlaneWrite, Runs
    from kvxfer.tracing.span import Span


@dataclass(slots=True)
class _Write:
    """A layer's blocks on their way to one decode rank. Times are nanoseconds since the epoch."""

    begun: int
    ended: int = 0
    nbytes: int = 0
    under_way: int = 0


class SendSpans:
    """The spans of a transfer's writes. Any thread may call posted(), under the session's lock;
    everything else is for the endpoint's loop.

    A prompt that is computed in chunks has a span for each chunk of a layer. The spans are made at
    the end from recorded times, so that posting is not delayed.
    """

    def __init__(self, span: Span, clock: Clock) -> None:
        self._span = span
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._writes: dict[tuple[int, int, int], _Write] = {}

    def accepted(self) -> None:
        self._span.event("offer taken up")

    def posted(self, rank: int, layer: int, first_block: int, operation: Operation) -> None:
        """Records a write of a layer to a rank of decode."""
        write = self._writes.setdefault((rank, layer, first_block), _Write(unix_ns(self._clock)))
        write.under_way += 1
        self._loop.call_soon_threadsafe(
            operation.on_end, partial(self._delivered, write, operation)
        )

    def end(self, error: KvxferError | None, fabric: str | None, nbytes: int) -> None:
        for (rank, layer, first_block), write in self._writes.items():
            span = self._span.child(
                "kv.write",
                write.begun,
                layer=layer,
                first_block=first_block,
                decode_rank=rank,
                bytes=write.nbytes,
            )
            span.end(error if write.under_way else None, end_ns=write.ended or None)
        self._span.set(fabric=fabric or "", bytes=nbytes)
        self._span.end(error)

    def _delivered(self, write: _Write, operation: Operation) -> None:
        write.ended = unix_ns(self._clock)
        write.under_way -= operation.error is None
        write.nbytes += operation.nbytes


class _Queued(NamedTuple):
    layer: int
    write: PlaneWrite
    blocks: range
    after: WatchFor | None


class _Posted(NamedTuple):
    write: PlaneWrite
    source: Offsets
    numbers: Offsets
    after: WatchFor | None


class Outbound:
    """An accepted OFFER. Its session's lock guards it.

    `source` and `target` are block tables with a row for each KV cache group.
    """

    def __init__(
        self,
        connection: Connection,
        offer: Offer,
        source: BlockIds,
        target: BlockIds,
        spans: SendSpans | None = None,
    ) -> None:
        self.connection = connection
        self._spans = spans
        self.operations: list[Operation] = []
        self.announced = False
        self._writes = connection.writes
        self._offer = offer
        self._source = source
        # Block ids counted from the first block of the grants.
        self._target = [np.where(row < 0, row, row - row[row >= 0].min()) for row in target]
        # Writes that wait for room in the engine, in order.
        self._queue: collections.deque[_Queued] = collections.deque()
        # Shared by all layers of a group whose blocks are equally far apart.
        self._offsets: dict[tuple[Runs, int, range], tuple[Offsets, Offsets, Offsets]] = {}
        self._checksum = RunningChecksum() if connection.checksums else None
        # Posted, but not yet in the checksum: some bytes may not be computed yet.
        self._unsummed: collections.deque[_Posted] = collections.deque()

    @property
    def waits(self) -> bool:
        """Whether the engine has not taken every write yet."""
        return bool(self._queue)

    @property
    def posted(self) -> int:
        """Immediates of the writes posted so far, by which the receiver's counter grows."""
        return sum(operation.immediates for operation in self.operations)

    def accept(self) -> None:
        self.connection.send(Accepted(self._offer.transfer_id))

    def add(self, layer: int, blocks: range, after: WatchFor | None = None) -> None:
        """Queues some of prefill's blocks of a layer; they are sent when `after` is reached."""
        self._queue.extend(_Queued(layer, write, blocks, after) for write in self._writes[layer])

    def post(self, timeout: float) -> bool:
        """Posts the queue as far as the engine has room, and returns whether all is posted.

        Raises ProtocolError if the OFFER is inconsistent, and other EngineErrors.
        """
        while self._queue:
            try:
                self._post(self._queue[0], timeout)
            except Backpressure:
                return False
            except InvalidArgument as bad:
                raise ProtocolError(self._says(f"{self._name} offers: {bad}")) from bad
            self._queue.popleft()
        self._sum()
        return True

    def announce(self, tail: bytes) -> None:
        """Sends DONE, once."""
        self.announced = True
        checksum = None
        if self._checksum is not None:
            self._sum()
            checksum = Checksum(self._checksum.value, self._source.shape[1])
        self.connection.send(Done(self._offer.transfer_id, self.posted, tail, checksum))

    def _post(self, queued: _Queued, timeout: float) -> None:
        layer, write, blocks, after = queued
        runs, group = write.runs, write.group
        if (runs, group, blocks) not in self._offsets:
            self._offsets[runs, group, blocks] = runs.offsets(
                write.src.places(self._source[group]),
                self._target[group],
                self._offer.first_block,
                blocks,
            )
        source, target, numbers = self._offsets[runs, group, blocks]
        if not len(source):
            return  # blocks that the prompt does not have, or that decode has or does not want
        operation = self.connection.peer.write_pages(
            write.src.region,
            self._offer.grants[write.dst],
            page_length=runs.length,
            src_pages=source,
            dst_pages=target,
            src_stride=1,
            dst_stride=1,
            src_offset=write.src.offset,
            imm=self._offer.imm,
            timeout=timeout,
            after=after,
        )
        self.operations.append(operation)
        if self._spans is not None:
            rank = self.connection.hello.layout.rank
            self._spans.posted(rank, layer, blocks.start, operation)
        if self._checksum is not None:
            self._unsummed.append(_Posted(write, source, numbers, after))

    def _sum(self) -> None:
        """Adds computed blocks to the checksum. They stay pinned until all is sent."""
        while self._checksum is not None and self._unsummed:
            write, source, numbers, after = self._unsummed[0]
            if after is not None and after.word.value < after.value:
                return
            self._unsummed.popleft()
            plane = write.src
            self._checksum.add(
                plane.region, plane.offset, write.runs, source, numbers, write.first_number
            )

    @property
    def _name(self) -> str:
        return f"decode worker {self.connection.hello.instance_id!r}"

    def _says(self, what: str) -> str:
        return f"transfer {self._offer.transfer_id}: {what}"
