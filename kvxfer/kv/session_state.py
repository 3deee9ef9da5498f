"""The states of both sessions and every allowed transition, as data; and the lease that ends them.

The tables are the protocol: an event that a state does not list is a violation. A `(state, event)`
that maps to the same state is expected there and changes nothing.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from kvxfer.clock import Clock
from kvxfer.errors import InvalidArgument, ProtocolError


class PrefillState(enum.StrEnum):
    WAITING = "waiting"  # the OFFER is awaited; layers written meanwhile are kept
    SENDING = "sending"  # ACCEPTED is sent; layers go out as they are written
    DRAINING = "draining"  # DONE is sent; some writes are not delivered yet
    CANCELLING = "cancelling"  # writes are being cancelled; some may still be under way
    DELIVERED = "delivered"  # every write is delivered
    CANCELLED = "cancelled"  # nothing is under way


class PrefillEvent(enum.StrEnum):
    OFFER = "offer"  # an OFFER that fits came
    FINISH = "finish"  # the engine has written every layer, and the OFFER has come
    DELIVERED = "delivered"  # the last write was delivered
    ABORT = "abort"  # we give up: cancel(), a write failed, endpoint closed
    LEASE_OVER = "lease-over"
    PEER_CANCEL = "peer-cancel"  # CANCEL came
    PEER_LOST = "peer-lost"
    DRAINED = "drained"  # the last cancelled write has ended


class DecodeState(enum.StrEnum):
    OFFERED = "offered"  # OFFER is sent
    RECEIVING = "receiving"  # ACCEPTED came
    COUNTING = "counting"  # DONE came; count < total
    COMPLETE = "complete"  # count == total; no further write can land
    TAKEN = "taken"  # the blocks belong to the engine
    CANCELLING = "cancelling"  # the counter is revoked; prefill's CANCELLED is awaited
    CANCELLED = "cancelled"
    FAILED = "failed"


class DecodeEvent(enum.StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    DONE = "done"
    COUNTED = "counted"  # count == total
    TAKE = "take"
    ABORT = "abort"  # we give up: cancel(), endpoint closed
    LEASE_OVER = "lease-over"
    PEER_CANCEL = "peer-cancel"  # CANCEL came: no write of prefill is under way
    PEER_CANCELLED = "peer-cancelled"  # CANCELLED came: the answer to our CANCEL
    PEER_LOST = "peer-lost"


_P, _PE = PrefillState, PrefillEvent
PREFILL_TRANSITIONS: Final[Mapping[tuple[PrefillState, PrefillEvent], PrefillState]] = {
    (_P.WAITING, _PE.OFFER): _P.SENDING,
    (_P.WAITING, _PE.ABORT): _P.CANCELLING,
    (_P.WAITING, _PE.LEASE_OVER): _P.CANCELLING,
    # In a brokered handshake decode is connected before its OFFER comes.
    (_P.WAITING, _PE.PEER_CANCEL): _P.CANCELLING,
    (_P.WAITING, _PE.PEER_LOST): _P.CANCELLING,
    (_P.SENDING, _PE.FINISH): _P.DRAINING,
    (_P.SENDING, _PE.ABORT): _P.CANCELLING,
    (_P.SENDING, _PE.LEASE_OVER): _P.CANCELLING,
    (_P.SENDING, _PE.PEER_CANCEL): _P.CANCELLING,
    (_P.SENDING, _PE.PEER_LOST): _P.CANCELLING,
    (_P.DRAINING, _PE.DELIVERED): _P.DELIVERED,
    (_P.DRAINING, _PE.ABORT): _P.CANCELLING,
    (_P.DRAINING, _PE.LEASE_OVER): _P.CANCELLING,
    (_P.DRAINING, _PE.PEER_CANCEL): _P.CANCELLING,
    (_P.DRAINING, _PE.PEER_LOST): _P.CANCELLING,
    (_P.CANCELLING, _PE.ABORT): _P.CANCELLING,
    (_P.CANCELLING, _PE.LEASE_OVER): _P.CANCELLING,
    (_P.CANCELLING, _PE.PEER_CANCEL): _P.CANCELLING,
    (_P.CANCELLING, _PE.PEER_LOST): _P.CANCELLING,
    (_P.CANCELLING, _PE.DRAINED): _P.CANCELLED,
}

_D, _DE = DecodeState, DecodeEvent
DECODE_TRANSITIONS: Final[Mapping[tuple[DecodeState, DecodeEvent], DecodeState]] = {
    (_D.OFFERED, _DE.ACCEPTED): _D.RECEIVING,
    (_D.OFFERED, _DE.REFUSED): _D.FAILED,
    (_D.OFFERED, _DE.ABORT): _D.CANCELLING,
    (_D.OFFERED, _DE.LEASE_OVER): _D.CANCELLING,
    (_D.OFFERED, _DE.PEER_CANCEL): _D.FAILED,
    (_D.OFFERED, _DE.PEER_LOST): _D.FAILED,
    (_D.RECEIVING, _DE.DONE): _D.COUNTING,
    (_D.RECEIVING, _DE.ABORT): _D.CANCELLING,
    (_D.RECEIVING, _DE.LEASE_OVER): _D.CANCELLING,
    (_D.RECEIVING, _DE.PEER_CANCEL): _D.FAILED,
    (_D.RECEIVING, _DE.PEER_LOST): _D.FAILED,
    (_D.COUNTING, _DE.COUNTED): _D.COMPLETE,
    (_D.COUNTING, _DE.ABORT): _D.CANCELLING,
    (_D.COUNTING, _DE.LEASE_OVER): _D.CANCELLING,
    (_D.COUNTING, _DE.PEER_CANCEL): _D.FAILED,
    (_D.COUNTING, _DE.PEER_LOST): _D.FAILED,
    # Everything has arrived and is correct; what happens to prefill now changes nothing.
    (_D.COMPLETE, _DE.TAKE): _D.TAKEN,
    (_D.COMPLETE, _DE.ABORT): _D.CANCELLED,
    (_D.COMPLETE, _DE.LEASE_OVER): _D.CANCELLED,
    (_D.COMPLETE, _DE.PEER_CANCEL): _D.COMPLETE,
    (_D.COMPLETE, _DE.PEER_LOST): _D.COMPLETE,
    # CANCEL crosses messages that prefill sent before it knew.
    (_D.CANCELLING, _DE.ACCEPTED): _D.CANCELLING,
    (_D.CANCELLING, _DE.DONE): _D.CANCELLING,
    (_D.CANCELLING, _DE.REFUSED): _D.CANCELLED,
    (_D.CANCELLING, _DE.PEER_CANCEL): _D.CANCELLED,
    (_D.CANCELLING, _DE.PEER_CANCELLED): _D.CANCELLED,
    (_D.CANCELLING, _DE.PEER_LOST): _D.CANCELLED,
    (_D.CANCELLING, _DE.ABORT): _D.CANCELLING,
    (_D.CANCELLING, _DE.LEASE_OVER): _D.CANCELLED,
}

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.StrEnum)


class StateMachine(Generic[S, E]):
    """The current state of one session. Not locked: the session that owns it is."""

    __slots__ = ("_table", "_what", "state")

    def __init__(self, what: str, table: Mapping[tuple[S, E], S], state: S) -> None:
        self._what = what
        self._table = table
        self.state = state

    def allows(self, event: E) -> bool:
        return (self.state, event) in self._table

    def advance(self, event: E) -> S:
        """Moves to the next state and returns it. Raises ProtocolError if there is none."""
        following = self._table.get((self.state, event))
        if following is None:
            raise ProtocolError(
                f"{self._what} is {self.state}, where {event!s} is not allowed; "
                "run the same version of kvxfer on both sides"
            )
        self.state = following
        return following


def why_left(error: BaseException | None) -> str:
    """Returns the reason that the other side is told for a session that was left early."""
    if error is None:
        return "its session was left"
    if isinstance(error, asyncio.CancelledError):
        return "its request was cancelled"
    return f"its session was left by {type(error).__name__}: {error}"


def when_done(future: asyncio.Future[Any]) -> asyncio.Future[None]:
    """Returns a future without an error that is done once `future` is. Cancelling it changes
    nothing."""
    done: asyncio.Future[None] = future.get_loop().create_future()
    future.add_done_callback(lambda _: None if done.done() else done.set_result(None))
    return done


class Lease:
    """A timer that calls `expire` on the event loop when `seconds` have passed. Any thread may call
    remaining()."""

    def __init__(self, seconds: float, expire: Callable[[], None], clock: Clock) -> None:
        self._expire = expire
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """Restarts the lease: it now ends `seconds` from now. Raises InvalidArgument."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidArgument(f"a lease of {seconds} s; pass a finite time of more than 0")
        self.end()
        self.seconds = seconds
        self._deadline = self._clock.monotonic() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def remaining(self) -> float:
        """Returns the seconds until the end, at least a millisecond: a wait needs a deadline."""
        return max(self._deadline - self._clock.monotonic(), 0.001)

    def end(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
