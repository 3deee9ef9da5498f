"""Lets vLLM's own allocator compute prompts of every length at prefill and receive them at decode,
and checks which blocks are there: `python window_probe.py`, in vLLM's environment."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvxfer.connectors.vllm.groups import HeldWindows, windows_of
from kvxfer.connectors.vllm.prompt_blocks import NULL_BLOCK, PromptBlocks
from kvxfer.errors import InvalidArgument

BLOCK = 16
CHUNK = 40
LONGEST = 120


def config_of(window: int) -> KVCacheConfig:
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["layers.1"], FullAttentionSpec(**shape)),
        KVCacheGroupSpec(["layers.0"], SlidingWindowSpec(**shape, sliding_window=window)),
    ]
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)


def manager_of(config: KVCacheConfig) -> KVCacheManager:
    return KVCacheManager(config, 1024, BLOCK, BLOCK, enable_caching=False)


def request_of(prompt: int) -> Request:
    tokens = list(range(prompt))
    return Request("r", tokens, SamplingParams(max_tokens=1), None)


def present(rows: tuple[tuple[int, ...], ...]) -> list[list[bool]]:
    return [[block != NULL_BLOCK for block in row] for row in rows]


def needed(config: KVCacheConfig, blocks: PromptBlocks, prompt: int) -> list[list[bool]]:
    """What decode's allocator has room for, when all but the last token come from prefill."""
    manager = manager_of(config)
    allocated = manager.allocate_slots(
        request_of(prompt), 0, num_external_computed_tokens=prompt - 1, delay_cache_blocks=True
    )
    assert allocated is not None
    return present(tuple(map(tuple, manager.get_block_ids("r"))))


def check(window: int, prompt: int) -> None:
    config = config_of(window)
    blocks = PromptBlocks(BLOCK, windows_of(config))
    assert blocks.windows == (None, window)
    manager = manager_of(config)
    held = HeldWindows(blocks)
    held.bind(manager)
    free = manager.block_pool.get_num_free_blocks()
    request = request_of(prompt)
    while request.num_computed_tokens < prompt:
        step = min(CHUNK, prompt - request.num_computed_tokens)
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
    held.hold("r", prompt)
    held.hold("r", prompt)
    table = held.block_ids("r")
    assert table is not None
    sent = blocks.table(table, prompt)
    assert present(sent) == needed(config, blocks, prompt), (window, prompt)

    # As when a request ends, or goes on for long: vLLM gives the window back.
    manager.remove_skipped_blocks("r", prompt + 2 * window)
    lost = {block for row in sent for block in row} - {NULL_BLOCK}
    pool = manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert lost.isdisjoint(block.block_id for block in taken), (window, prompt)
    pool.free_blocks(taken)
    held.release(("r", "another"))
    held.release(("r",))
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == free, (window, prompt)


def main() -> None:
    for window in (2, 15, 16, 17, 33, 100):
        for prompt in range(2, LONGEST):
            check(window, prompt)
    state = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,))
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["layers.0"], state)])
    try:
        windows_of(config)
    except InvalidArgument as error:
        assert "the KV cache of layers.0 is a MambaSpec" in str(error)
    else:
        raise AssertionError("state that is no attention is moved")
    print("windows of", LONGEST, "prompts")


if __name__ == "__main__":
    main()
