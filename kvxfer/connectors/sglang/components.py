"""SGLang's KV cache, and the state beside it, as the buffers of KVArgs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple, Protocol

from kvxfer.errors import InvalidArgument

KV: Final = "kv"

# SGLang's StateTypes with one item for a request in each buffer, ...
_ROWS: Final = frozenset({"mamba", "qsa_pending"})
# ... and those with one for each of a request's last pages, or for all its pages.
_PAGES: Final = frozenset(
    {
        "swa",
        "dsa",
        "block_scale",
        "block_scale_swa",
        "minimax_index_k",
        "minimax_dense_kv",
        "qsa_compressed",
    }
)
_K_AND_V: Final = frozenset({KV, "swa"})


class Pool(Protocol):
    """The used part of SGLang's KVArgs: address, length and bytes per item of each buffer. An item
    is a page, or a row of a request."""

    page_size: int
    kv_data_ptrs: list[int]
    kv_data_lens: list[int]
    kv_item_lens: list[int]
    aux_data_ptrs: list[int]
    aux_item_lens: list[int]
    state_types: list[str]
    state_data_ptrs: list[list[int]]
    state_data_lens: list[list[int]]
    state_item_lens: list[list[int]]


class Buffer(NamedTuple):
    address: int
    nbytes: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Component:
    """Buffers whose items have the same numbers."""

    kind: str
    """`KV`, or a StateType of SGLang's."""
    place: int
    """The index in SGLang's lists of states; without meaning for `KV`."""
    buffers: tuple[Buffer, ...]
    mla: bool = False

    @property
    def is_row(self) -> bool:
        """True if a request has one item, instead of one for each page."""
        return self.kind in _ROWS

    @property
    def items(self) -> int:
        """The number of items in each buffer."""
        return min(buffer.nbytes // buffer.item_bytes for buffer in self.buffers)

    @property
    def layers(self) -> tuple[tuple[Buffer, ...], ...]:
        """K and V of each layer if these are equally large, otherwise one buffer for each layer.
        SGLang lists the K buffers of all layers, then the V buffers."""
        half = len(self.buffers) // 2
        keys, values = self.buffers[:half], self.buffers[half:]
        if (
            self.kind in _K_AND_V
            and not self.mla
            and [key.item_bytes for key in keys] == [value.item_bytes for value in values]
        ):
            return tuple(zip(keys, values, strict=True))
        return tuple((buffer,) for buffer in self.buffers)

    def __str__(self) -> str:
        sizes = groupby(buffer.item_bytes for buffer in self.buffers)
        return f"{self.kind} " + " ".join(f"{len(list(same))}x{size}" for size, same in sizes)


def components_of(pool: Pool, *, mla: bool) -> tuple[Component, ...]:
    """Returns the KV cache, then each state in SGLang's order, without those that have no bytes.

    Raises InvalidArgument, which names the state, if it cannot be moved.
    """
    found = [
        Component(KV, 0, _buffers(pool.kv_data_ptrs, pool.kv_data_lens, pool.kv_item_lens), mla=mla)
    ]
    for place, kind in enumerate(map(_name, pool.state_types)):
        if kind not in _ROWS | _PAGES:
            raise InvalidArgument(
                f"the model keeps state of the kind {kind!r}, which kvxfer does not move; use "
                "another --disaggregation-transfer-backend"
            )
        of_kind = (pool.state_data_ptrs, pool.state_data_lens, pool.state_item_lens)
        found.append(Component(kind, place, _buffers(*(lists[place] for lists in of_kind))))
    present = tuple(component for component in found if component.buffers)
    if not present:
        raise InvalidArgument("SGLang has no KV buffers; a model without them needs no kvxfer")
    for component in present:
        if component.items < 1:
            raise InvalidArgument(f"SGLang's buffers of {component} have no whole item")
    return present


def describe(components: Sequence[Component]) -> str:
    """Returns a text that must be equal on both sides; "" for a KV cache of pages of one size,
    whose layout describes it."""
    sizes = {buffer.item_bytes for component in components for buffer in component.buffers}
    if len(components) == len(sizes) == 1 and components[0].kind == KV:
        return ""
    return ", ".join(map(str, components))


def _name(kind: str) -> str:
    # str() of SGLang's enum of strings does not return the string.
    return str(getattr(kind, "value", kind))


def _buffers(
    addresses: Sequence[int], lengths: Sequence[int], item_bytes: Sequence[int]
) -> tuple[Buffer, ...]:
    """Returns the non-empty buffers: a layer that shares another's top-k keeps no index."""

    def found() -> Iterator[Buffer]:
        for buffer in zip(addresses, lengths, item_bytes, strict=True):
            if buffer[2]:
                yield Buffer(*buffer)

    return tuple(found())
