"""The connection to one peer of an endpoint: its HELLO, the plans of the writes between the two
caches, and the messages to the peer, in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

from kvxfer.clock import Clock
from kvxfer.errors import (
    Backpressure,
    EngineClosed,
    EngineError,
    KvxferError,
    PeerError,
    PeerTimeout,
    ProtocolError,
)
from kvxfer.instances import Role
from kvxfer.kv.blocks import by_group
from kvxfer.kv.cache import REORDERS, permute_on_host
from kvxfer.kv.messages import Hello, Message, encode
from kvxfer.kv.plan import TransferPlan, plan_transfer
from kvxfer.kv.plane_writes import PlaneArrival, PlaneWrite, bind_arrivals, bind_plan
from kvxfer.kv_versions import NEWEST, OLDEST, TELLS_MODEL
from kvxfer.model_identity import require_same_model

if TYPE_CHECKING:
    from kvxfer.engine import Peer
    from kvxfer.engine.memory import Region
    from kvxfer.kv.admission import CurrentIdentity, Side
    from kvxfer.kv.block_pool import BlockIds
    from kvxfer.kv.cache import KvCache
    from kvxfer.kv.messages import Done
    from kvxfer.ticket import Ticket


PATIENCE_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.005
# Between two tries at most this counts, so that the time in which this process was stopped does not
# count against the peer.
_MOST_SECONDS: Final = 0.1


class Outbox:
    """The messages to a peer, queued while the engine has no room. Any thread may call send();
    everything else is for the loop that the outbox was made on.

    A message that the engine has not accepted after PATIENCE_SECONDS is never sent: `give_up` is
    called, and has to end the connection. The peer then learns from the loss what the message would
    have said.
    """

    def __init__(self, peer: Peer, give_up: Callable[[KvxferError], object], clock: Clock) -> None:
        self._peer = peer
        self._give_up = give_up
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, bytes]] = deque()  # (deadline by _waited, message)
        self._waited = 0.0
        self._tried_at = 0.0

    def send(self, data: bytes) -> None:
        """Sends, or queues until there is room. Raises PeerLost and MessageTooLarge."""
        with self._lock:
            if not self._waiting:
                with contextlib.suppress(Backpressure):
                    self._peer.send(data)
                    return
                self._tried_at = self._clock.monotonic()
                self._loop.call_soon_threadsafe(self._retry_later)
            self._waiting.append((self._waited + PATIENCE_SECONDS, data))

    def close(self) -> None:
        """Ends sending. If messages are queued, they are not sent, and the connection ends."""
        with self._lock:
            unsaid = bool(self._waiting)
            self._waiting.clear()
        if unsaid:
            with contextlib.suppress(EngineError):
                self._peer.fence()

    def _retry_later(self) -> None:
        self._loop.call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        error: KvxferError
        with self._lock:
            now = self._clock.monotonic()
            self._waited += min(now - self._tried_at, _MOST_SECONDS)
            self._tried_at = now
            try:
                while self._waiting:
                    self._peer.send(self._waiting[0][1])
                    self._waiting.popleft()
                return
            except Backpressure as full:
                if self._waited < self._waiting[0][0]:
                    self._retry_later()
                    return
                error = PeerTimeout(
                    f"peer {self._peer.engine_id} took no message for {PATIENCE_SECONDS:g} s: "
                    f"{full}"
                )
            except (PeerError, EngineClosed):
                self._waiting.clear()  # the loss of the peer is reported
                return
            except EngineError as other:
                error = other
            self._waiting.clear()
        self._give_up(error)


logger = logging.getLogger(__name__)


def hello_from(cache: KvCache, identity: CurrentIdentity, *, checksums: bool = False) -> Hello:
    """Returns the HELLO that introduces a cache."""
    return Hello(
        version=OLDEST,
        instance_id=identity.instance_id,
        epoch=identity.epoch,
        layout=cache.layout,
        num_blocks=cache.num_blocks,
        block_strides=tuple(tuple(p.block_stride for p in layer) for layer in cache.planes),
        permutes=cache.permute is not None,
        checksums=checksums,
        newest=NEWEST,
        model=identity.model,
    )


def grant_ranges(
    cache: KvCache, plan: TransferPlan, blocks: BlockIds
) -> list[tuple[Region, int, int]]:
    """Returns the range of each plane that a writer of this plan to these blocks needs: region,
    offset and bytes."""
    rows = by_group(blocks, cache.layout)
    ends = [(int(row[row >= 0].min()), int(row.max())) for row in rows]
    ranges = []
    layouts = cache.layout.of_layers
    for layer in plan.layers:
        low, high = ends[cache.layout.group_of(layer.dst_layer)]
        part_bytes = layouts[layer.dst_layer].part_bytes
        for plane in cache.planes[layer.dst_layer]:
            nbytes = (high - low) * plane.block_stride + part_bytes
            before = low - (0 if plane.ids is None else plane.ids.start)
            ranges.append((plane.region, plane.offset + before * plane.block_stride, nbytes))
    return ranges


def check_hello(hello: Hello) -> None:
    """Raises ProtocolError if a HELLO contradicts itself or there is no common version."""
    layout = hello.layout
    problem = None
    oldest, newest = hello.versions
    if newest < OLDEST or oldest > NEWEST:
        problem = (
            f"it speaks versions {oldest} to {newest} of the protocol, this side {OLDEST} to "
            f"{NEWEST}"
        )
    elif hello.num_blocks < 1:
        problem = f"its pool has {hello.num_blocks} blocks"
    elif list(map(len, hello.block_strides)) != [len(layer.parts) for layer in layout.of_layers]:
        problem = "its planes are not those of its layout"
    elif any(
        stride < layer.part_bytes
        for layer, strides in zip(layout.of_layers, hello.block_strides, strict=True)
        for stride in strides
    ):
        problem = "the blocks of a plane overlap"
    if problem:
        raise ProtocolError(
            f"the HELLO of {hello.instance_id!r} cannot be used: {problem}; "
            "run the same version of kvxfer on both sides"
        )


class DecodeSide(Protocol):
    """A transfer from the peer; it gets prefill's messages about the transfer."""

    answered: bool

    @property
    def ticket(self) -> Ticket: ...

    def accepted(self) -> None: ...

    def done(self, done: Done) -> None: ...

    def refused(self, error: KvxferError) -> None: ...

    def cancelled_by_peer(self, reason: str) -> None: ...

    def cancel_answered(self) -> None: ...

    def peer_lost(self, error: KvxferError) -> None: ...


class Connection:
    """The connection to one peer of a KvEndpoint, and the transfers from it by their ids. Loop
    only."""

    def __init__(
        self,
        peer: Peer,
        cache: KvCache,
        unreachable: Callable[[Connection, KvxferError], object],
        *,
        identity: CurrentIdentity,
        clock: Clock,
        checksums: bool = False,
    ) -> None:
        """Takes `unreachable`, which is called when a message could not be sent in time, and has to
        end the connection."""
        self.peer = peer
        self._outbox = Outbox(peer, lambda error: unreachable(self, error), clock)
        self.decodes: dict[str, DecodeSide] = {}
        self.error: KvxferError | None = None
        self.on_hello: Callable[[Hello], None] | None = None
        self._cache = cache
        self._identity = identity
        self._checksums = checksums
        self._hello: Hello | None = None
        self._greeted: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        # If it is not awaited, a lost peer is not an unhandled error.
        self._greeted.add_done_callback(lambda future: future.cancelled() or future.exception())

    def send(self, message: Message) -> None:
        """Sends in order, as soon as there is room. Raises PeerLost, or MessageTooLarge."""
        self._outbox.send(encode(message))

    @property
    def hello(self) -> Hello:
        """The peer's HELLO. Raises ProtocolError if it has sent something else first."""
        if self._hello is None:
            raise ProtocolError(
                f"peer {self.peer.engine_id} named a transfer before its HELLO; "
                "run the same version of kvxfer on both sides"
            )
        return self._hello

    @property
    def named(self) -> tuple[str, int] | None:
        """Instance id and epoch of the peer; None before its HELLO."""
        hello = self._hello
        return None if hello is None else (hello.instance_id, hello.epoch)

    def greet(self, hello: Hello) -> None:
        """Takes the peer's first HELLO, or a later one with another epoch or model. Raises
        ProtocolError."""
        check_hello(hello)
        if self._hello is not None and (
            hello.instance_id != self._hello.instance_id
            or hello.layout != self._hello.layout
            or hello.block_strides != self._hello.block_strides
            or hello.permutes != self._hello.permutes
            or hello.checksums != self._hello.checksums
        ):
            raise ProtocolError(
                f"instance {self._hello.instance_id!r} changed its id or cache while connected; "
                "connect again for another cache"
            )
        if self._hello is None and hello.model is None and self._identity.model is not None:
            logger.warning(
                "instance %r does not report the model of its KV cache: only the layout is "
                "compared",
                hello.instance_id,
            )
        self._hello = hello
        if not self._greeted.done():
            self._greeted.set_result(hello)
        if self.on_hello is not None:
            self.on_hello(hello)

    async def greeted(self) -> Hello:
        """Waits for the peer's HELLO. Raises the error that ended the connection before it."""
        return await asyncio.shield(self._greeted)

    def lose(self, error: KvxferError) -> None:
        """Notes the error that has ended the connection."""
        self.error = error
        self._outbox.close()
        if not self._greeted.done():
            self._greeted.set_exception(error)

    @property
    def checksums(self) -> bool:
        """Whether either side wants a checksum with every DONE."""
        return self._checksums or self.hello.checksums

    @property
    def tells_adapters(self) -> bool:
        """Whether the peer's OFFERs name the adapter."""
        return self.hello.versions[1] >= TELLS_MODEL

    def require_same_model(self, side: Side) -> None:
        """Raises LayoutMismatch if the two KV caches are of different models; `side` is ours."""
        models = (self._identity.model, self.hello.model)
        require_same_model(*(models if side is Role.PREFILL else models[::-1]))

    def require_touchable(self, side: Side) -> None:
        """Raises InvalidArgument if the processor has to read or reorder our cache in a transfer,
        and it is memory of a GPU; `side` is ours. Also raises LayoutMismatch, and TransferRefused
        while the cache has no memory."""
        self._identity.require_memory()
        if self.checksums:
            self._cache.require_host_memory(
                f"checksums, which {self.hello.instance_id!r} wants, need host memory; start both "
                "sides without checksums"
            )
        on_host = self._cache.permute is permute_on_host
        if side is Role.DECODE and on_host and self.inbound_plan.permutes:
            self._cache.require_host_memory(REORDERS)

    @cached_property
    def outbound_plan(self) -> TransferPlan:
        """The plan of our writes to the peer if we prefill. Raises LayoutMismatch."""
        hello = self.hello
        return plan_transfer(self._cache.layout, hello.layout, decode_permutes=hello.permutes)

    @cached_property
    def writes(self) -> tuple[tuple[PlaneWrite, ...], ...]:
        """The writes to the peer, by layer, if we prefill. Raises LayoutMismatch."""
        return bind_plan(self.outbound_plan, self._cache, self.hello)

    @cached_property
    def inbound_plan(self) -> TransferPlan:
        """The plan of the peer's writes to us if it prefills. Raises LayoutMismatch."""
        permutes = self._cache.permute is not None
        return plan_transfer(self.hello.layout, self._cache.layout, decode_permutes=permutes)

    @cached_property
    def arrivals(self) -> tuple[PlaneArrival, ...]:
        """The peer's writes as they arrive, if it prefills. Raises LayoutMismatch."""
        return tuple(bind_arrivals(self.inbound_plan, self._cache))
