"""SGLang's KV pool and the state beside it as a KvCache, and its rows of metadata."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from kvxfer.connectors.sglang.components import KV, Buffer, Component
from kvxfer.errors import InvalidArgument
from kvxfer.kv.cache import KvCache, KvPlane
from kvxfer.kv.messages import MAX_TAIL_BYTES
from kvxfer.layout import KvLayout, LayerShape

if TYPE_CHECKING:
    from kvxfer.engine import Engine


def layout_of(components: Sequence[Component], page_size: int) -> KvLayout:
    """Returns the layout of a pool: a KV cache group for each component.

    Both sides have the same heads, so the heads of a token are treated as one wide head of bytes.
    Raises InvalidArgument if the bytes of a page are not a multiple of its tokens.
    """
    of_layers = [
        (group, _shape_of(component, layer[0], len(layer), page_size))
        for group, component in enumerate(components)
        for layer in component.layers
    ]
    whole = all(component.kind == KV for component in components)
    return KvLayout.from_layers(
        [shape for _, shape in of_layers],
        page_size,
        layer_groups=() if whole else tuple(group for group, _ in of_layers),
    )


def _shape_of(component: Component, buffer: Buffer, parts: int, page_size: int) -> LayerShape:
    nbytes = buffer.item_bytes
    if component.is_row:
        return LayerShape(
            num_kv_heads=1,
            head_size=nbytes,
            dtype="uint8",
            order="HND",
            kv="state",
            packing=component.kind,
            sections=(nbytes,),
        )
    if nbytes % page_size:
        raise InvalidArgument(
            f"SGLang's buffers of {component} have pages of {nbytes} bytes for {page_size} tokens, "
            "which kvxfer does not move; choose another --page-size"
        )
    return LayerShape(
        num_kv_heads=1,
        head_size=nbytes // page_size,
        dtype="uint8",
        kv="separate" if parts == 2 or component.mla else "joined",
        mla=component.mla,
        packing="" if parts == 2 or component.mla else component.kind,
    )


def group_ids(components: Sequence[Component]) -> list[range]:
    """Returns the block ids of each component. As components share no memory, the id of a page or
    row is its number plus the items of all components before."""
    ends = list(accumulate(component.items for component in components))
    return [range(end - one.items, end) for end, one in zip(ends, components, strict=True)]


def register_pool(engine: Engine, components: Sequence[Component], layout: KvLayout) -> KvCache:
    """Registers the buffers. SGLang keeps the memory for as long as the process runs. CUDA's driver
    reports whether it is a GPU's memory."""
    alone = len(components) == 1
    planes = [
        [
            KvPlane(
                engine.register(buffer.address, len(ids) * buffer.item_bytes),
                0,
                buffer.item_bytes,
                None if alone else ids,
            )
            for buffer in layer
        ]
        for component, ids in zip(components, group_ids(components), strict=True)
        for layer in component.layers
    ]
    # With one head, both orders are the same.
    return KvCache(layout, sum(one.items for one in components), planes, permute=None)


class Metadata:
    """SGLang's metadata buffers. A request has a row in each: its first token, logprobs and the
    like. The rows travel as the tail of a transfer."""

    def __init__(self, addresses: Sequence[int], row_bytes: Sequence[int]) -> None:
        self._rows = tuple(zip(addresses, row_bytes, strict=True))
        self.nbytes = sum(row_bytes)
        if self.nbytes > MAX_TAIL_BYTES:
            raise InvalidArgument(
                f"SGLang's metadata of a request has {self.nbytes} bytes; kvxfer carries at most "
                f"{MAX_TAIL_BYTES}"
            )

    def read(self, index: int) -> bytes:
        """Returns what prefill has left in row `index` of each buffer, joined."""
        return b"".join(
            ctypes.string_at(address + index * length, length) for address, length in self._rows
        )

    def write(self, index: int, tail: bytes) -> None:
        """Fills row `index` of each buffer. Raises InvalidArgument if the other side has other
        buffers."""
        if len(tail) != self.nbytes:
            raise InvalidArgument(
                f"prefill sent {len(tail)} bytes of metadata, decode has room for {self.nbytes}; "
                "run the same version of SGLang with the same options on both sides"
            )
        at = 0
        for address, length in self._rows:
            ctypes.memmove(address + index * length, tail[at : at + length], length)
            at += length
