"""One end of the measured transfers: engine, cache, model and endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.gpu.settings import BLOCK_SIZE, Settings
from kvxfer import Engine
from kvxfer.kv import BlockPool, KvCache, KvEndpoint, KvIdentity, KvOptions
from kvxfer.reference.compute import ComputeThread
from kvxfer.reference.devices import device_of
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import seeded_weights
from kvxfer.reference.worker.cache_view import torch_view
from kvxfer.reference.worker.stream_order import StreamOrder

EPOCH: Final = 1
_PATIENCE: Final = 30.0  # seconds, for a process that shares a GPU


@dataclass(frozen=True, slots=True)
class Worker:
    engine: Engine
    pool: BlockPool
    endpoint: KvEndpoint
    runner: ModelRunner
    compute: ComputeThread
    order: StreamOrder | None


def make_model(settings: Settings) -> LlamaModel:
    """Makes the model: the same in every process, made from a seed on its device."""
    device = device_of(settings.gpu)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return LlamaModel(settings.config, seeded_weights(settings.config, 0, device, dtype))


@contextlib.asynccontextmanager
async def worker(
    name: str, fabric: str, key: str, settings: Settings, model: LlamaModel
) -> AsyncIterator[Worker]:
    """Starts a worker whose kernels are already compiled."""

    def begin() -> None:
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)

    async with (
        Engine(cluster_key=key, name=name, fabrics=(fabric,), peer_timeout=_PATIENCE) as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        cache = stack.enter_context(
            KvCache.allocate(engine, settings.layout, settings.blocks, gpu=settings.gpu)
        )
        pool = BlockPool(settings.blocks)
        endpoint = await stack.enter_async_context(
            KvEndpoint(
                engine,
                cache,
                pool,
                KvIdentity(name, key, EPOCH),
                KvOptions(connect_timeout=_PATIENCE),
            )
        )
        view = torch_view(cache, settings.config, model.device)
        runner = ModelRunner(model, ByteTokenizer(), view)
        compute = stack.enter_context(contextlib.closing(ComputeThread(begin)))
        order = None
        if model.device.type == "cuda":
            order = StreamOrder(engine, model.device.index, torch.cuda.current_stream(model.device))
        await compute.run(lambda: runner.generate([0] * BLOCK_SIZE, max_tokens=2))
        yield Worker(engine, pool, endpoint, runner, compute, order)
