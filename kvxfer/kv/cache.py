"""The KV cache of a worker: its layout, and the place of every plane in registered memory.

If the heads of blocks arrive in the other order, they are put into the cache's own, in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kvxfer.errors import InvalidArgument
from kvxfer.layout import HeadOrder, KvLayout, Part

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvxfer.engine import Engine, Memory, MemoryRegion
    from kvxfer.engine.memory import Region
    from kvxfer.kv.block_pool import BlockIds

Permute: TypeAlias = Callable[["KvCache", "BlockIds", HeadOrder], None]
"""Reorders blocks whose heads are in the given order. It is called in a thread, touches no other
blocks, and returns when the last byte is in place."""

# The bytes that are copied aside at a time; they stay in the processor's cache.
_CHUNK_BYTES: Final = 1 << 20

REORDERS: Final = (
    "permute_on_host cannot reorder heads there; pass permute=None, or a function that reorders "
    "them on the GPU"
)


@dataclass(frozen=True, slots=True)
class KvPlane:
    """One plane (K, V or KV) of one layer: block `b` begins `offset + b * block_stride` bytes into
    `region`. A block is contiguous; between two blocks there may be a gap.

    With `ids` the plane has only the blocks of these ids, and the first of them begins at `offset`:
    KV cache groups that share no memory have ids of different ranges.
    """

    region: Region
    offset: int
    block_stride: int
    ids: range | None = None

    def places(self, ids: BlockIds) -> BlockIds:
        """Returns ids counted from the first block of the plane. Absent ones stay unchanged."""
        return ids if self.ids is None else np.where(ids < 0, ids, ids - self.ids.start)


def permute_on_host(cache: KvCache, blocks: BlockIds, arrived: HeadOrder) -> None:
    """Swaps tokens and heads of blocks in place, a MiB at a time: the `Permute` for a cache in host
    memory. `blocks` has their ids, [blocks]; `arrived` is the order that they are in. Raises
    InvalidArgument for memory of a GPU."""
    cache.require_host_memory(REORDERS)
    at_once = max(1, _CHUNK_BYTES // cache.layout.part_bytes)
    for plane in (plane for layer in cache.planes for plane in layer):
        before = _blocks_of(plane, cache, arrived)
        after = _blocks_of(plane, cache, cache.layout.order)
        for begin in range(0, len(blocks), at_once):
            some = blocks[begin : begin + at_once]
            after[some] = before[some].swapaxes(2, 3)


def _blocks_of(plane: KvPlane, cache: KvCache, order: HeadOrder) -> np.ndarray[Any, Any]:
    """Returns a plane as [block, K or V, tokens, heads, bytes], with tokens and heads swapped for
    HND."""
    layout: KvLayout = cache.layout
    vector = layout.vector_bytes
    tokens, heads = layout.block_size, layout.heads_per_rank
    outer, inner = (heads, tokens) if order == "HND" else (tokens, heads)
    vectors = layout.part_bytes // (outer * inner * vector)
    memory = (ctypes.c_uint8 * plane.region.nbytes).from_address(plane.region.address)
    return np.ndarray(
        (cache.num_blocks, vectors, outer, inner, vector),
        dtype=np.uint8,
        buffer=np.ctypeslib.as_array(memory),
        offset=plane.offset,
        strides=(plane.block_stride, outer * inner * vector, inner * vector, vector, 1),
    )


class KvCache:
    """`num_blocks` blocks of a layout in registered memory. Any thread; it only holds data.

    `planes[layer][i]` is the plane of `layout.of_layer(layer).parts[i]`, layers counted from 0 on
    this rank. `permute` reorders the heads of blocks from a peer with the other head order; with
    None they are put in order on the way, in many small writes. Planes may be memory of a GPU; then
    checksums and permute_on_host, which need the processor, are refused. `owns` are the regions
    that close() gives back to the engine. Raises InvalidArgument if a plane is missing or leaves
    its memory region.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        planes: Sequence[Sequence[KvPlane]],
        *,
        permute: Permute | None = permute_on_host,
        owns: Sequence[MemoryRegion] = (),
    ) -> None:
        self.layout = layout
        self.permute = permute
        self.num_blocks = num_blocks
        self.planes = tuple(tuple(layer) for layer in planes)
        self._memory: Memory | None = None
        self._owns = tuple(owns)
        if num_blocks < 1:
            raise InvalidArgument(f"KvCache of {num_blocks} blocks; give it at least 1")
        if len(self.planes) != layout.layers_per_rank:
            raise InvalidArgument(
                f"KvCache has planes for {len(self.planes)} layers, its layout has "
                f"{layout.layers_per_rank} on this rank; pass the planes of every layer"
            )
        for index, (of_layer, layer) in enumerate(zip(layout.of_layers, self.planes, strict=True)):
            parts = of_layer.parts
            if len(layer) != len(parts):
                raise InvalidArgument(
                    f"layer {index} of the KvCache has {len(layer)} planes, its layout has "
                    f"{len(parts)} ({', '.join(parts)})"
                )
            for part, plane in zip(parts, layer, strict=True):
                self._check_plane(index, part, plane)
        self._check_groups()
        regions = [plane.region for layer in self.planes for plane in layer]
        self.gpu = next((region.gpu for region in regions if region.gpu is not None), None)
        """The GPU of planes in GPU memory, by CUDA's number; None if all are host memory."""

    def require_host_memory(self, why: str) -> None:
        """Raises InvalidArgument with the reason `why` if a plane is memory of a GPU."""
        if self.gpu is not None:
            raise InvalidArgument(f"the KvCache is memory of GPU {self.gpu}: {why}")

    def _check_plane(self, layer: int, part: Part, plane: KvPlane) -> None:
        nbytes = self.layout.of_layer(layer).part_bytes
        if plane.offset < 0 or plane.block_stride < nbytes:
            raise InvalidArgument(
                f"plane {part} of layer {layer}: offset {plane.offset}, block stride "
                f"{plane.block_stride}; the offset is >= 0 and a block of this layout takes "
                f"{nbytes} bytes"
            )
        ids = range(self.num_blocks) if plane.ids is None else plane.ids
        if ids.start < 0 or ids.stop > self.num_blocks or not ids or ids.step != 1:
            raise InvalidArgument(
                f"plane {part} of layer {layer} has blocks {ids}; pass a range of the ids 0 to "
                f"{self.num_blocks - 1}"
            )
        end = plane.offset + (len(ids) - 1) * plane.block_stride + nbytes
        if end > plane.region.nbytes:
            raise InvalidArgument(
                f"plane {part} of layer {layer} ends at byte {end} of a memory region of "
                f"{plane.region.nbytes} bytes; register at least that much, or use fewer blocks"
            )

    def _check_groups(self) -> None:
        known: dict[int, range | None] = {}
        for index, layer in enumerate(self.planes):
            group = self.layout.group_of(index)
            for plane in layer:
                if known.setdefault(group, plane.ids) != plane.ids:
                    raise InvalidArgument(
                        f"layer {index} has blocks {plane.ids}, another one of its KV cache group "
                        f"{known[group]}; layers of a group share their ids"
                    )

    @classmethod
    def allocate(
        cls,
        engine: Engine,
        layout: KvLayout,
        num_blocks: int,
        *,
        gpu: int | None = None,
        permute: Permute | None = permute_on_host,
    ) -> KvCache:
        """Allocates a cache in new shareable memory of the engine, plane after plane, layer after
        layer.

        gpu: CUDA's number, in this process, of the GPU whose memory it is; None for host memory.

        The cache owns the memory; `memory` and `buffer()` give access to it, and on a GPU
        `MemoryRegion.read` and `write`.
        """
        nbytes = num_blocks * layout.stack_bytes
        memory = engine.alloc(nbytes) if gpu is None else engine.alloc(nbytes, gpu=gpu)
        planes: list[list[KvPlane]] = []
        offset = 0
        for layer in layout.of_layers:
            planes.append([])
            for _ in layer.parts:
                planes[-1].append(KvPlane(memory.region, offset, layer.part_bytes))
                offset += num_blocks * layer.part_bytes
        try:
            cache = cls(
                layout,
                num_blocks,
                planes,
                permute=permute,
            )
        except BaseException:
            memory.close()
            raise
        cache._memory = memory
        return cache

    @classmethod
    def register(
        cls,
        engine: Engine,
        layout: KvLayout,
        num_blocks: int,
        arrays: Sequence[Sequence[Any]],
        *,
        permute: Permute | None = permute_on_host,
    ) -> KvCache:
        """Makes a cache in the caller's memory: `arrays[layer][i]` is the plane of that part.

        Each array (anything that Engine.register() takes except an address) is contiguous with the
        block as its first dimension; one that several layers share is registered once. The cache
        owns the registrations, the caller keeps the memory.
        """
        regions: dict[int, MemoryRegion] = {}
        try:
            planes = []
            for layer in arrays:
                for array in layer:
                    if id(array) not in regions:
                        regions[id(array)] = engine.register(array)
                registered = [regions[id(array)] for array in layer]
                planes.append(
                    [KvPlane(region, 0, region.nbytes // num_blocks) for region in registered]
                )
            return cls(layout, num_blocks, planes, permute=permute, owns=tuple(regions.values()))
        except BaseException:
            for region in regions.values():
                region.close()
            raise

    def plane(self, layer: int, part: Part) -> KvPlane:
        """Returns the plane of a part in a layer of this rank."""
        return self.planes[layer][self.layout.of_layer(layer).parts.index(part)]

    @property
    def memory(self) -> Memory:
        """The memory of allocate(), on the host or a GPU, for example for `torch.from_dlpack`. A
        plane begins `plane(layer, part).offset` bytes into it.

        Raises InvalidArgument if the cache is in the caller's own memory.
        """
        if self._memory is None:
            raise InvalidArgument(
                "this KvCache is in memory that its engine registered; use those arrays"
            )
        return self._memory

    def buffer(self, layer: int, part: Part) -> memoryview:
        """Returns the bytes of a plane of an allocated cache in host memory, `num_blocks *
        part_bytes` of its layer, writable.

        Raises InvalidArgument if the cache is in the caller's own memory.
        """
        memory = self.memory
        plane = self.plane(layer, part)
        nbytes = self.num_blocks * self.layout.of_layer(layer).part_bytes
        return memoryview(memory)[plane.offset : plane.offset + nbytes]

    def suspend(self) -> None:
        """Closes the registrations of the caller's memory, which may then be freed until resume().
        Raises InvalidArgument for a cache that allocate() made."""
        if self._memory is not None:
            raise InvalidArgument("KvCache.allocate() made this cache; it cannot be suspended")
        for region in self._owns:
            region.close()

    def resume(self) -> None:
        """Registers the memory again, at the same addresses. Raises as Engine.register() does."""
        for region in self._owns:
            region.reopen()

    def close(self) -> None:
        """Gives back what the cache owns. Afterwards no peer can write into it."""
        for region in self._owns:
            region.close()
        self._owns = ()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
