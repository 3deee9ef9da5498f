"""vLLM's KV cache groups: which of them can be moved, and which blocks a transfer holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from kvxfer.connectors.vllm.prompt_blocks import BlockGroup, BlockTable, PromptBlocks
from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import KVCacheBlock
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def groups_of(config: KVCacheConfig, block_size: int) -> tuple[BlockGroup, ...]:
    """Returns what each group keeps, for tables with an entry for each `block_size` tokens. Raises
    InvalidArgument for a group that is neither attention over all tokens or the last ones, nor
    recurrent state, and for blocks whose tokens are not a multiple of `block_size`."""
    groups: list[BlockGroup] = []
    for group in config.kv_cache_groups:
        of_layers = {
            _group_of(group.layer_names[0], spec, block_size)
            for spec in iter_layer_specs(group.kv_cache_spec)
        }
        if len(of_layers) != 1:
            windows = {one.window for one in of_layers}
            raise InvalidArgument(
                f"layers beside {group.layer_names[0]} have sliding windows of {windows} and the "
                "same blocks; kvxfer moves one window of a group: serve this model without kvxfer"
            )
        groups += of_layers
    return tuple(groups)


def _group_of(layer: str, spec: KVCacheSpec, block_size: int) -> BlockGroup:
    if type(spec) is MambaSpec and spec.mamba_cache_mode == "none":
        return BlockGroup(state=True, single=True)
    if spec.block_size % block_size:
        raise InvalidArgument(
            f"the blocks of {layer} have {spec.block_size} tokens, which is no multiple of "
            f"{block_size}; set --block-size to a number that divides those of all layers"
        )
    entries = spec.block_size // block_size
    # Subclasses are excluded: they keep blocks in another way.
    if type(spec) is SlidingWindowSpec:
        window = spec.sliding_window + spec.extra_retained_tokens
        return BlockGroup(window=window, entries=entries)
    if type(spec) is MambaSpec:
        return BlockGroup(state=True, entries=entries)
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return BlockGroup(entries=entries)
    raise InvalidArgument(
        f"the KV cache of {layer} is a {type(spec).__name__}; kvxfer moves those of attention over "
        "all tokens or a sliding window, and recurrent state: serve this model without kvxfer"
    )


def layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Returns the cache spec of each layer that vLLM names."""
    found: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        found |= {name: each.get(name, spec) for name in group.layer_names}
    return found


class HeldWindows:
    """Blocks of sliding windows, and states, held until they are sent. One thread: the engine's own
    loop.

    vLLM frees a block as soon as no later token attends to it; when a request ends, even before it
    asks the connector. So the blocks that decode needs are held from the step that completes the
    prompt until they are sent.
    """

    def __init__(self, blocks: PromptBlocks) -> None:
        self._blocks = blocks
        self._manager: KVCacheManager
        self._held: dict[str, tuple[BlockTable, list[KVCacheBlock]]] = {}

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def hold(self, request_id: str, prompt_tokens: int) -> None:
        """Holds the blocks of a prompt whose moved part is computed after this step. Any number of
        times."""
        groups = self._blocks.groups
        if request_id in self._held or not any(group.partial for group in groups):
            return
        of_request = self._manager.get_blocks(request_id)
        held = [
            block
            for group, blocks in zip(groups, of_request.blocks, strict=True)
            if group.partial
            for block in self._blocks.in_place(group, blocks, prompt_tokens).values()
        ]
        self._manager.block_pool.touch(held)
        self._held[request_id] = tuple(map(tuple, of_request.get_block_ids())), held

    def block_ids(self, request_id: str) -> BlockTable | None:
        """Returns all blocks that a request had when some of them were held; None if none are."""
        table, _ = self._held.get(request_id, (None, []))
        return table

    def release(self, request_ids: Iterable[str]) -> None:
        """Releases the held blocks of requests, which are sent or will not be sent."""
        for request_id in request_ids:
            _, held = self._held.pop(request_id, ((), []))
            if held:
                self._manager.block_pool.free_blocks(reversed(held))
