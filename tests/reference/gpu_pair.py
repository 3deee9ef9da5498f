"""Prefill and decode with caches in GPU memory: `python -m tests.reference.gpu_pair FABRIC MODE`.

On the double, kernels are interpreted in the order of its streams, and the rest of the model runs
on the processor. On a GPU, with a torch built for it, everything runs there. MODE `ordered`
compares the tokens with those of one process on the processor. `unordered` sends layers without
regard to the stream, which has to change tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sys
from dataclasses import dataclass
from typing import Final

import torch
from cuda.bindings import driver
from torch import Tensor

from kvxfer.engine import Engine, WatchFor
from kvxfer.instances import Role
from kvxfer.kv.cache import KvCache
from kvxfer.reference.gpu_cache import GpuKvCache
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.weights import seeded_weights
from kvxfer.reference.worker.cache_view import torch_view
from kvxfer.reference.worker.completions import DecodeCompletion
from kvxfer.reference.worker.stream_order import StreamOrder
from tests.cuda.bindings import context, good
from verify.polling import eventually

from .tiny import TINY
from .workers import BLOCK_SIZE, MODEL, OnGpu, WorkerPair, single_process, start_worker

# Prompts that end at, before and after the end of a block, and of the tokens of a kernel's step.
LENGTHS: Final = (1, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65)
TOKENS: Final = 8
ON_DOUBLE: Final = not torch.cuda.is_available()
if ON_DOUBLE:
    from tests.cuda.kernel_streams import device_tensor, kernels_on, synchronize


class Unordered(StreamOrder):
    def mark(self) -> WatchFor | None:  # type: ignore[override]
        return None


@dataclass(frozen=True, slots=True)
class DoubleStream:
    """A stream of the double, with the members of a torch.cuda.Stream."""

    cuda_stream: int

    def synchronize(self) -> None:
        synchronize(self.cuda_stream)


class CacheOnDouble(GpuKvCache):
    """A cache whose attention waits for the kernels; its stores are not waited for."""

    stream: DoubleStream

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        with kernels_on(self.stream.cuda_stream):
            super().write(layer, slots, keys, values)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: Tensor,
        length: int,
    ) -> Tensor:
        with kernels_on(self.stream.cuda_stream):
            found = super().attend(layer, queries, keys, values, blocks, length)
        self.stream.synchronize()
        return found


class OnDouble:
    """A worker on the double."""

    model = MODEL

    def __init__(self, order: type[StreamOrder]) -> None:
        self._order = order
        self._stream = DoubleStream(int(good(driver.cuStreamCreate(1))))

    def begin(self) -> None:
        context()

    def view(self, cache: KvCache) -> PagedKvCache:
        shape = (cache.num_blocks * BLOCK_SIZE, TINY.num_kv_heads, TINY.head_size)

        def plane(of_layer: int, part: int) -> Tensor:
            there = cache.planes[of_layer][part]
            return device_tensor(there.region.address + there.offset, shape, torch.float32)

        planes = [(plane(layer, 0), plane(layer, 1)) for layer in range(TINY.num_layers)]
        view = CacheOnDouble(TINY, cache.num_blocks, BLOCK_SIZE, planes)
        view.stream = self._stream
        return view

    def order(self, engine: Engine) -> StreamOrder:
        return self._order(engine, 0, self._stream)


class OnRealGpu:
    """A worker on GPU 0."""

    def __init__(self, order: type[StreamOrder]) -> None:
        self._order = order
        self._device = torch.device("cuda", 0)
        weights = seeded_weights(TINY, seed=1)
        self.model = LlamaModel(TINY, {name: each.cuda() for name, each in weights.items()})

    def begin(self) -> None:
        torch.cuda.set_device(self._device)

    def view(self, cache: KvCache) -> PagedKvCache:
        return torch_view(cache, TINY, self._device)

    def order(self, engine: Engine) -> StreamOrder:
        return self._order(engine, 0, torch.cuda.current_stream(self._device))


async def decoded(workers: WorkerPair, prompt: list[int]) -> list[int]:
    """Returns the tokens of a prompt. Its blocks are offered before prefill begins, so each layer
    is sent at once."""
    request = workers.request(prompt, max_tokens=TOKENS)
    decode = asyncio.create_task(workers.decode.service.complete(request))
    await eventually(lambda: len(workers.prefill.endpoint._prefill_side._early) > 0)
    await workers.prefill.service.complete(request)
    answer = await decode
    assert isinstance(answer, DecodeCompletion)
    return answer.choices[0].token_ids


async def main(fabric: str, mode: str) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    expected = [single_process().generate(prompt, TOKENS) for prompt in prompts]
    order = Unordered if mode == "unordered" else StreamOrder
    key = secrets.token_hex(16)
    async with contextlib.AsyncExitStack() as stack:
        workers: list[OnGpu] = [(OnDouble if ON_DOUBLE else OnRealGpu)(order) for _ in range(2)]
        pair = WorkerPair(
            await start_worker(stack, Role.PREFILL, key, fabric, gpu=workers[0]),
            await start_worker(stack, Role.DECODE, key, fabric, gpu=workers[1]),
            key,
        )
        found = [await decoded(pair, prompt) for prompt in prompts]
        await eventually(pair.all_blocks_free)
    both = zip(LENGTHS, found, expected, strict=True)
    wrong = [length for length, tokens, of_one in both if tokens != of_one]
    print(f"prompts with other tokens than on one processor: {wrong}")
    assert bool(wrong) == (mode == "unordered"), (found, expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    context()
    asyncio.run(main(*sys.argv[1:]))
