"""Lets vLLM's own allocator compute prompts of every length at prefill and receive them at decode,
and checks which blocks they have: `python window_probe.py`, in vLLM's environment."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvxfer.connectors.vllm.groups import HeldWindows, groups_of
from kvxfer.connectors.vllm.prompt_blocks import NULL_BLOCK, BlockGroup, PromptBlocks
from kvxfer.errors import InvalidArgument

BLOCK = 16
CHUNK = 40
LONGEST = 120
MOST = 1024
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def window_of(tokens: int, block_size: int = BLOCK) -> KVCacheSpec:
    return SlidingWindowSpec(**{**SHAPE, "block_size": block_size}, sliding_window=tokens)


def state_of(mode: str) -> KVCacheSpec:
    """Returns the spec of a state at the end of every block, or of one in a single block as long as
    the longest prompt."""
    size = BLOCK if mode == "align" else MOST
    return MambaSpec(
        block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def config_of(spec: KVCacheSpec) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec(["layers.1"], FullAttentionSpec(**SHAPE)),
        KVCacheGroupSpec(["layers.0"], spec),
    ]
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)


def manager_of(config: KVCacheConfig) -> KVCacheManager:
    longest = max(group.kv_cache_spec.block_size for group in config.kv_cache_groups)
    return KVCacheManager(config, MOST, longest, BLOCK, enable_caching=False)


def request_of(prompt: int) -> Request:
    tokens = list(range(prompt))
    return Request("r", tokens, SamplingParams(max_tokens=1), None)


def present(rows: tuple[tuple[int, ...], ...]) -> list[list[bool]]:
    return [[block != NULL_BLOCK for block in row] for row in rows]


def needed(config: KVCacheConfig, blocks: PromptBlocks, prompt: int) -> list[list[bool]]:
    """Returns the blocks that decode's allocator has when all but the last token come from
    prefill."""
    manager = manager_of(config)
    allocated = manager.allocate_slots(
        request_of(prompt), 0, num_external_computed_tokens=prompt - 1, delay_cache_blocks=True
    )
    assert allocated is not None
    ids = manager.get_block_ids("r")
    if not blocks.exact:
        spread = [
            {(at + 1) * group.entries - 1: block for at, block in enumerate(row)}
            for group, row in zip(blocks.groups, ids, strict=True)
        ]
        entries = range(max(map(max, spread)) + 1)
        return present(tuple(tuple(row.get(at, NULL_BLOCK) for at in entries) for row in spread))
    # There may be room for more states; decode reads the last one.
    table = blocks.table(ids, prompt)
    assert table[1][-1] != NULL_BLOCK
    return present(table)


def check(spec: KVCacheSpec, group: BlockGroup, prompt: int) -> None:
    config = config_of(spec)
    blocks = PromptBlocks(BLOCK, groups_of(config, BLOCK))
    assert blocks.groups == (BlockGroup(), group)
    computed = blocks.moved(prompt) if blocks.exact else prompt
    manager = manager_of(config)
    held = HeldWindows(blocks)
    held.bind(manager)
    free = manager.block_pool.get_num_free_blocks()
    request = request_of(computed)
    while request.num_computed_tokens < computed:
        step = min(CHUNK, computed - request.num_computed_tokens)
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
    held.hold("r", prompt)
    held.hold("r", prompt)
    table = held.block_ids("r")
    assert table is not None
    sent = blocks.table(table, prompt)
    assert present(sent) == needed(config, blocks, prompt), (spec, prompt)

    # vLLM gives the window back when a request ends, or goes on for long.
    manager.remove_skipped_blocks("r", prompt + 2 * LONGEST)
    lost = {block for row in sent for block in row} - {NULL_BLOCK}
    pool = manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert lost.isdisjoint(block.block_id for block in taken), (spec, prompt)
    pool.free_blocks(taken)
    held.release(("r", "another"))
    held.release(("r",))
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == free, (spec, prompt)


def main() -> None:
    kept = [(window_of(size), BlockGroup(window=size)) for size in (2, 15, 16, 17, 33, 100)]
    kept += [
        (window_of(size, 3 * BLOCK), BlockGroup(window=size, entries=3)) for size in (2, 33, 100)
    ]
    kept += [
        (state_of("none"), BlockGroup(state=True, single=True)),
        (state_of("align"), BlockGroup(state=True)),
    ]
    for spec, group in kept:
        for prompt in range(2, LONGEST):
            check(spec, group, prompt)
    local = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=BLOCK)
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["layers.0"], local)])
    try:
        groups_of(config, BLOCK)
    except InvalidArgument as error:
        assert "the KV cache of layers.0 is a ChunkedLocalAttentionSpec" in str(error)
    else:
        raise AssertionError("attention in chunks is moved")
    print("windows of", LONGEST, "prompts")


if __name__ == "__main__":
    main()
