"""A prefill and a decode worker in one process, each with its own engine."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.engine import Engine
from kvxfer.instances import Role
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity
from kvxfer.reference.compute import ComputeThread
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.versions import VersionGate
from kvxfer.reference.weights import seeded_weights
from kvxfer.reference.worker.cache_view import torch_view
from kvxfer.reference.worker.completions import CompletionRequest, KvTransferParams
from kvxfer.reference.worker.metered_engine import MeteredEngine
from kvxfer.reference.worker.service import WorkerService
from kvxfer.reference.worker.stream_order import StreamOrder
from kvxfer.ticket import Ticket, sign_ticket
from verify.polling import PATIENCE

from .tiny import TINY

BLOCKS = 32
BLOCK_SIZE = 4
EPOCH = 7
MODEL = LlamaModel(TINY, seeded_weights(TINY, seed=1))


def single_process() -> ModelRunner:
    """Returns a runner of the same model, whose output the workers' output has to equal."""
    return ModelRunner(MODEL, ByteTokenizer(), PagedKvCache(TINY, BLOCKS, BLOCK_SIZE))


@dataclass
class Worker:
    service: WorkerService
    pool: BlockPool
    engine: MeteredEngine
    endpoint: KvEndpoint
    gate: VersionGate


class OnGpu(Protocol):
    """The GPU side of a worker whose cache is in memory of GPU 0."""

    model: LlamaModel

    def begin(self) -> None:
        """Runs in the compute thread before anything else."""

    def view(self, cache: KvCache) -> PagedKvCache: ...

    def order(self, engine: Engine) -> StreamOrder: ...


@dataclass
class WorkerPair:
    """Both workers, and the tickets that a router would get from the control plane."""

    prefill: Worker
    decode: Worker
    cluster_key: str

    def request(
        self, prompt: str | list[int], *, turned: bool = False, **fields: Any
    ) -> CompletionRequest:
        """A request with a fresh ticket, good for both workers; `turned` swaps their sides."""
        prefill, decode = ("decode", "prefill") if turned else ("prefill", "decode")
        transfer_id = uuid.uuid4().hex
        ticket = Ticket(
            transfer_id=transfer_id,
            request_id=f"request-{transfer_id}",
            prefill_id=prefill,
            prefill_epoch=EPOCH,
            decode_id=decode,
            decode_epoch=EPOCH,
            expires_at=SYSTEM_CLOCK.unix() + 20 * PATIENCE,
        )
        params = KvTransferParams(
            ticket=sign_ticket(ticket, self.cluster_key),
            prefill_engine_address=(self.decode if turned else self.prefill).engine.address,
        )
        return CompletionRequest(prompt=prompt, kv_transfer_params=params, **fields)

    def all_blocks_free(self) -> bool:
        for worker in (self.prefill, self.decode):
            worker.pool.check()
        return self.prefill.pool.num_free == self.decode.pool.num_free == BLOCKS


async def start_worker(
    stack: contextlib.AsyncExitStack,
    role: Role,
    key: str,
    fabric: str,
    block_size: int = BLOCK_SIZE,
    gpu: OnGpu | None = None,
    *,
    model: LlamaModel = MODEL,
    identity: ModelIdentity | None = None,
) -> Worker:
    layout = KvLayout(
        num_layers=TINY.num_layers,
        num_kv_heads=TINY.num_kv_heads,
        head_size=TINY.head_size,
        dtype="float32",
        block_size=block_size,
    )
    engine = await stack.enter_async_context(
        MeteredEngine(cluster_key=key, name=str(role), fabrics=(fabric,), peer_timeout=PATIENCE)
    )
    cache = stack.enter_context(
        KvCache.allocate(engine, layout, BLOCKS, gpu=None if gpu is None else 0)
    )
    pool = BlockPool(BLOCKS)
    endpoint = await stack.enter_async_context(
        KvEndpoint(
            engine,
            cache,
            pool,
            KvIdentity(str(role), key, EPOCH, identity),
            KvOptions(lease_seconds=10 * PATIENCE, connect_timeout=PATIENCE),
        )
    )
    if gpu is None:
        compute, order = ComputeThread(), None
        runner = ModelRunner(model, ByteTokenizer(), torch_view(cache, TINY, model.device))
    else:
        compute, order = ComputeThread(gpu.begin), gpu.order(engine)
        runner = ModelRunner(gpu.model, ByteTokenizer(), gpu.view(cache))
    stack.enter_context(contextlib.closing(compute))
    gate = VersionGate(compute)
    service = WorkerService(role, runner, cache, pool, endpoint, engine, compute, order, gate)
    return Worker(service, pool, engine, endpoint, gate)
