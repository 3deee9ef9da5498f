"""What an endpoint knows of one connected peer: its HELLO, and where writes to its cache go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvxfer.errors import KvxferError, ProtocolError
from kvxfer.kv.cache import KvCache
from kvxfer.kv.messages import PROTOCOL_VERSION, Hello, Message, encode
from kvxfer.kv.plan import LayerPlan, StridedCopy, TransferPlan, plan_transfer

if TYPE_CHECKING:
    from kvxfer.engine import MemoryRegion, Peer
    from kvxfer.kv.block_pool import BlockIds
    from kvxfer.kv.decode_session import DecodeSession
    from kvxfer.kv.prefill_session import PrefillSession


@dataclass(frozen=True, slots=True)
class PlaneWrite:
    """One strided copy with everything but the block tables: what Peer.write_pages is given.

    `dst`: an index into Offer.grants; `dst_offset` is that of the lowest block offered.
    """

    src: MemoryRegion
    dst: int
    page_length: int
    src_offset: int
    dst_offset: int
    src_stride: int
    dst_stride: int


def hello_from(cache: KvCache, *, instance_id: str, epoch: int) -> Hello:
    """The HELLO that introduces a cache."""
    return Hello(
        version=PROTOCOL_VERSION,
        instance_id=instance_id,
        epoch=epoch,
        layout=cache.layout,
        num_blocks=cache.num_blocks,
        block_strides=tuple(tuple(p.block_stride for p in layer) for layer in cache.planes),
    )


def grant_ranges(cache: KvCache, blocks: BlockIds) -> list[tuple[MemoryRegion, int, int]]:
    """What a writer to these blocks needs of each plane: region, offset and bytes."""
    low, high = int(blocks.min()), int(blocks.max())
    return [
        (
            plane.region,
            plane.offset + low * plane.block_stride,
            (high - low) * plane.block_stride + cache.layout.part_bytes,
        )
        for layer in cache.planes
        for plane in layer
    ]


def check_hello(hello: Hello) -> None:
    """Raises ProtocolError where a HELLO contradicts itself or is of another version."""
    layout = hello.layout
    problem = None
    if hello.version != PROTOCOL_VERSION:
        problem = f"its protocol version is {hello.version}, this one is {PROTOCOL_VERSION}"
    elif hello.num_blocks < 1:
        problem = f"its pool has {hello.num_blocks} blocks"
    elif len(hello.block_strides) != layout.layers_per_rank or any(
        len(layer) != len(layout.parts) for layer in hello.block_strides
    ):
        problem = "its planes are not those of its layout"
    elif any(stride < layout.part_bytes for layer in hello.block_strides for stride in layer):
        problem = "the blocks of a plane overlap"
    if problem:
        raise ProtocolError(
            f"the HELLO of {hello.instance_id!r} cannot be used: {problem}; "
            "run the same version of kvxfer on both sides"
        )


def bind_plan(plan: TransferPlan, src: KvCache, dst: Hello) -> tuple[tuple[PlaneWrite, ...], ...]:
    """The writes of a plan between two real caches, by prefill layer."""

    def bind(layer: LayerPlan, copy: StridedCopy, run: int) -> PlaneWrite:
        source = src.plane(layer.src_layer, copy.src_part)
        part = dst.layout.parts.index(copy.dst_part)
        return PlaneWrite(
            src=source.region,
            dst=layer.dst_layer * len(dst.layout.parts) + part,
            page_length=copy.length,
            src_offset=source.offset + copy.src_offset + run * copy.src_stride,
            dst_offset=copy.dst_offset + run * copy.dst_stride,
            src_stride=source.block_stride,
            dst_stride=dst.block_strides[layer.dst_layer][part],
        )

    return tuple(
        tuple(bind(layer, copy, run) for copy in layer.copies for run in range(copy.count))
        for layer in plan.layers
    )


class KvPair:
    """One connected peer of a KvEndpoint, and the sessions with it by transfer id. Loop only."""

    def __init__(self, peer: Peer, cache: KvCache) -> None:
        self.peer = peer
        self.prefills: dict[str, PrefillSession] = {}
        self.decodes: dict[str, DecodeSession] = {}
        self.error: KvxferError | None = None
        self._cache = cache
        self._hello: Hello | None = None
        self._greeted: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        # A lost peer that nobody waits for is no unhandled error.
        self._greeted.add_done_callback(lambda future: future.cancelled() or future.exception())

    def send(self, message: Message) -> None:
        """Raises PeerLost, or MessageTooLarge."""
        self.peer.send(encode(message))

    @property
    def hello(self) -> Hello:
        """The peer's HELLO. Raises ProtocolError where it has sent something else first."""
        if self._hello is None:
            raise ProtocolError(
                f"peer {self.peer.engine_id} spoke of a transfer before its HELLO; "
                "run the same version of kvxfer on both sides"
            )
        return self._hello

    def greet(self, hello: Hello) -> None:
        """Takes the peer's first HELLO, or a later one with another epoch. Raises ProtocolError."""
        check_hello(hello)
        if self._hello is not None and (
            hello.instance_id != self._hello.instance_id
            or hello.layout != self._hello.layout
            or hello.block_strides != self._hello.block_strides
        ):
            raise ProtocolError(
                f"instance {self._hello.instance_id!r} changed its id or cache in mid-connection; "
                "connect again for another cache"
            )
        self._hello = hello
        if not self._greeted.done():
            self._greeted.set_result(hello)

    async def greeted(self) -> Hello:
        """Waits for the peer's HELLO. Raises the error that ended the connection before."""
        return await asyncio.shield(self._greeted)

    def lose(self, error: KvxferError) -> None:
        """The connection has ended."""
        self.error = error
        if not self._greeted.done():
            self._greeted.set_exception(error)

    @cached_property
    def writes(self) -> tuple[tuple[PlaneWrite, ...], ...]:
        """Our writes to the peer, by layer, where we prefill. Raises LayoutMismatch."""
        plan = plan_transfer(self._cache.layout, self.hello.layout)
        return bind_plan(plan, self._cache, self.hello)

    @cached_property
    def inbound_plan(self) -> TransferPlan:
        """What the peer writes to us, where it prefills. Raises LayoutMismatch."""
        return plan_transfer(self.hello.layout, self._cache.layout)
