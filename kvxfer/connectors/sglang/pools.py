"""SGLang's KV pool as a KvCache, or a refusal that says what cannot be mapped."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvxfer.errors import InvalidArgument
from kvxfer.kv.cache import KvCache, KvPlane
from kvxfer.kv.messages import MAX_TAIL_BYTES
from kvxfer.layout import KvLayout

if TYPE_CHECKING:
    from kvxfer.engine import Engine


class Pool(Protocol):
    """What is used of SGLang's KVArgs: addresses, lengths and bytes per page of each buffer."""

    page_size: int
    kv_data_ptrs: list[int]
    kv_data_lens: list[int]
    kv_item_lens: list[int]
    aux_data_ptrs: list[int]
    aux_item_lens: list[int]


def layout_of(pool: Pool, *, mla: bool) -> KvLayout:
    """The layout of a pool whose pages are of one size.

    SGLang gives the K buffers of all layers, then those of V; MLA has one for each layer. Both
    sides have the same heads, so that the heads of a token are taken for one wide head of bytes.
    Raises InvalidArgument for everything else.
    """
    parts = 1 if mla else 2
    sizes = sorted(set(pool.kv_item_lens))
    if len(sizes) != 1:
        raise InvalidArgument(
            f"the pages of SGLang's KV buffers have {sizes} bytes; kvxfer moves models whose "
            "layers, and whose K and V, are of one size"
        )
    [page_bytes] = sizes
    if len(pool.kv_data_ptrs) % parts or page_bytes % pool.page_size:
        raise InvalidArgument(
            f"{len(pool.kv_data_ptrs)} KV buffers of {page_bytes} bytes for a page of "
            f"{pool.page_size} tokens are no K and V for each layer"
        )
    return KvLayout(
        num_layers=len(pool.kv_data_ptrs) // parts,
        num_kv_heads=1,
        head_size=page_bytes // pool.page_size,
        dtype="uint8",
        block_size=pool.page_size,
        mla=mla,
    )


def register_pool(engine: Engine, pool: Pool, layout: KvLayout) -> KvCache:
    """Registers the buffers; SGLang keeps the memory, for as long as the process runs."""
    [page_bytes] = set(pool.kv_item_lens)
    pages = min(pool.kv_data_lens) // page_bytes
    planes = [
        KvPlane(engine.register(address, pages * page_bytes), 0, page_bytes)
        for address in pool.kv_data_ptrs
    ]
    layers = layout.num_layers
    return KvCache(layout, pages, [planes[layer::layers] for layer in range(layers)])


class Metadata:
    """SGLang's metadata buffers: the first token of a request, its logprobs and the like, in a row
    of each. They travel as the tail of a transfer."""

    def __init__(self, addresses: Sequence[int], row_bytes: Sequence[int]) -> None:
        self._rows = tuple(zip(addresses, row_bytes, strict=True))
        self.nbytes = sum(row_bytes)
        if self.nbytes > MAX_TAIL_BYTES:
            raise InvalidArgument(
                f"SGLang's metadata of a request has {self.nbytes} bytes; kvxfer carries at most "
                f"{MAX_TAIL_BYTES}"
            )

    def read(self, index: int) -> bytes:
        """What prefill has left in row `index` of each buffer."""
        return b"".join(
            ctypes.string_at(address + index * length, length) for address, length in self._rows
        )

    def write(self, index: int, tail: bytes) -> None:
        """Raises InvalidArgument where the other side has other buffers."""
        if len(tail) != self.nbytes:
            raise InvalidArgument(
                f"prefill sent {len(tail)} bytes of metadata, decode has room for {self.nbytes}; "
                "run the same version of SGLang with the same options on both sides"
            )
        at = 0
        for address, length in self._rows:
            ctypes.memmove(address + index * length, tail[at : at + length], length)
            at += length
