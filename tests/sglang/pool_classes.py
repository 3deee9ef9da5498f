"""Moves SGLang's own pools between two instances, without a model: `python -m
tests.sglang.pool_classes KIND`, in SGLang's environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import setup_state_kv_args
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MambaPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvxfer.connectors.sglang.progress import Progress
from kvxfer.connectors.sglang.rooms import Room
from kvxfer.prompt_digest import prompt_digest
from tests.connectors.sglang.instances import ended, two, until

ROOM = Room(4711, prompt_digest([1, 2, 3]))
OURS, THEIRS = [3, 9, 1, 4, 7], [8, 2, 5, 0, 6]
PAGES = 10


@dataclass
class Made:
    """A pool, and its tensors with items as first dimension, each with a name."""

    pool: Any
    page_size: int
    mla: bool
    tensors: list[tuple[str, torch.Tensor]]


def windows() -> Made:
    """Makes a pool whose two kinds of layers differ in heads, and whose V differ in size from K."""
    pool = SWAKVPool(
        size=(PAGES - 1) * 16,
        size_swa=5 * 16,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=32,
        v_head_dim=16,
        swa_head_num=4,
        swa_head_dim=24,
        swa_v_head_dim=8,
        swa_attention_layer_ids=[0, 1, 3],
        full_attention_layer_ids=[2, 4],
        device="cpu",
    )
    tensors = []
    for what, one in (("kv", pool.full_kv_pool), ("swa", pool.swa_kv_pool)):
        tensors += [(what, by_page(buffer, 16)) for buffer in one.k_buffer + one.v_buffer]
    return Made(pool, 16, False, tensors)


def mamba() -> Made:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=128,
        n_groups=2,
        num_heads=4,
        head_dim=32,
        state_size=32,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    states = MambaPool(
        size=4,
        spec_state_size=4,
        cache_params=Mamba2CacheParams(shape=shape, dtype=dtype, layers=[0, 2, 3]),
        mamba_layer_ids=[0, 2, 3],
        device="cpu",
    )
    pool = HybridLinearKVPool(
        size=(PAGES - 1) * 16,
        dtype=torch.bfloat16,
        page_size=16,
        head_num=2,
        head_dim=32,
        full_attention_layer_ids=[1, 4],
        device="cpu",
        mamba_pool=states,
    )
    full = pool.full_kv_pool
    tensors = [("kv", by_page(buffer, 16)) for buffer in full.k_buffer + full.v_buffer]
    for state in (*states.mamba_cache.conv, states.mamba_cache.temporal):
        tensors += [("mamba", of_layer) for of_layer in state]
    return Made(pool, 16, False, tensors)


def sparse() -> Made:
    """Makes a pool whose second layer uses the top-k of the first, and has no index."""
    pool = DSATokenToKVPool(
        size=(PAGES - 1) * 64,
        page_size=64,
        kv_lora_rank=512,
        dtype=torch.bfloat16,
        qk_rope_head_dim=64,
        layer_num=3,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=576,
        index_buf_size=(PAGES - 1) * 64,
        skip_topk_layers=[False, True, False],
    )
    tensors = [("kv", by_page(buffer, 64)) for buffer in pool.kv_buffer]
    tensors += [("dsa", buffer) for buffer in pool.index_k_with_scale_buffer if len(buffer)]
    return Made(pool, 64, True, tensors)


def by_page(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    return buffer.view(-1, page_size, *buffer.shape[1:])


def kv_args(made: Made) -> KVArgs:
    """Fills KVArgs as PrefillBootstrapQueue and DecodePreallocQueue do."""
    args = KVArgs()
    args.page_size = made.pool.page_size
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = made.pool.get_contiguous_buf_infos()
    setup_state_kv_args(args, made.pool)
    return args


# The states of one request as send_kv_chunk() and pop_preallocated() give them, and the source of
# each item.
STATES: dict[str, tuple[list[Any], list[Any], dict[int, int]]] = {
    "windows": ([np.array([3, 1])], [np.array([4, 2])], {4: 3, 2: 1}),
    "mamba": ([[np.array(2)]], [[np.array(4)]], {4: 2}),
    "sparse": ([np.array(OURS)], [np.array(THEIRS)], dict(zip(THEIRS, OURS, strict=True))),
}
POOLS: dict[str, Callable[[], Made]] = {"windows": windows, "mamba": mamba, "sparse": sparse}


def as_bytes(tensor: torch.Tensor) -> Iterator[bytes]:
    for item in tensor:
        yield item.contiguous().view(torch.uint8).numpy().tobytes()


def main(kind: str) -> None:
    torch.manual_seed(1)
    ours, theirs = POOLS[kind](), POOLS[kind]()
    for made, value in ((ours, None), (theirs, 0)):
        for _, tensor in made.tensors:
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(1, 256, raw.shape) if value is None else torch.zeros(raw.shape))
    sources, targets, items = STATES[kind]
    assert len({what for what, _ in ours.tensors}) == 2
    with two(kv_args=(kv_args(ours), kv_args(theirs)), mla=ours.mla) as both:
        sender, receiver = both.prefill.outgoing(), both.incoming()
        receiver.receive(ROOM, THEIRS, 3, targets)
        sender.begin(ROOM, len(OURS))
        until(lambda: sender.progress is not Progress.BOOTSTRAPPING)
        assert sender.progress is Progress.WAITING, (sender.error, receiver.error)
        sender.send(OURS[:3], 1)
        sender.send(OURS[3:], 1, sources)
        ended(sender, receiver)
        assert (sender.progress, receiver.progress) == (Progress.SUCCESS, Progress.SUCCESS)
    pages = dict(zip(THEIRS, OURS, strict=True))
    for (what, source), (_, target) in zip(ours.tensors, theirs.tensors, strict=True):
        sent = list(as_bytes(source))
        wanted = pages if what == "kv" else items
        for item, there in enumerate(as_bytes(target)):
            assert there == (sent[wanted[item]] if item in wanted else bytes(len(there))), what


if __name__ == "__main__":
    main(sys.argv[1])
