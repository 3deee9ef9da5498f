"""The spans of a traced prefill session: one for the whole, below it one for each layer's write."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvxfer.clock import Clock, unix_ns

if TYPE_CHECKING:
    from kvxfer.engine import Operation
    from kvxfer.errors import KvxferError
    from kvxfer.tracing.span import Span


@dataclass(slots=True)
class _Write:
    """A layer's blocks on their way to one decode rank. Times are nanoseconds since the epoch."""

    begun: int
    ended: int = 0
    nbytes: int = 0
    under_way: int = 0


class SendSpans:
    """posted(): any thread, under the session's lock. Everything else: the endpoint's loop.

    A prompt that is computed in chunks has a span for each chunk of a layer. They are made in the
    end, of times that were noted: posting is not held up.
    """

    def __init__(self, span: Span, clock: Clock) -> None:
        self._span = span
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._writes: dict[tuple[int, int, int], _Write] = {}

    def accepted(self) -> None:
        self._span.event("offer taken up")

    def posted(self, rank: int, layer: int, first_block: int, operation: Operation) -> None:
        """A write of a layer, to a rank of decode."""
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
