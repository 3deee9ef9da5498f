"""A worker from start to stop: model, cache, engine, KV endpoint, HTTP, registration."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from kvxfer.checkpoint_digest import digest_of_folder
from kvxfer.client import ControlPlaneClient, Registration
from kvxfer.engine import Engine, EngineOptions
from kvxfer.engine.operator_options import engine_options
from kvxfer.engine.options import DEFAULT_PEER_TIMEOUT
from kvxfer.instances import InstanceSpec, InstanceState, Role
from kvxfer.kv import (
    BlockPool,
    KvCache,
    KvEndpoint,
    KvIdentity,
    KvLayout,
    KvOptions,
    ModelIdentity,
)
from kvxfer.reference.compute import ComputeThread
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.devices import device_of
from kvxfer.reference.runner import BLOCK_SIZE, SEED, ModelRunner, load_model
from kvxfer.reference.versions import Policy, VersionGate
from kvxfer.reference.worker.app import make_app
from kvxfer.reference.worker.cache_view import torch_view
from kvxfer.reference.worker.gpu_blocks import GpuBlocks
from kvxfer.reference.worker.http_server import HttpServer
from kvxfer.reference.worker.metered_engine import MeteredEngine
from kvxfer.reference.worker.service import WorkerService
from kvxfer.reference.worker.settings import WorkerSettings
from kvxfer.reference.worker.stream_order import StreamOrder
from kvxfer.reference.worker.updates import WorkerUpdates
from kvxfer.tracing.setup import tracing
from kvxfer.web.listener import bind, url_of

_CONNECT_SECONDS: Final = 2.0

_log = logging.getLogger("kvxfer.worker")


@dataclass(frozen=True, slots=True)
class Ready:
    """The addresses of a worker that serves."""

    instance_id: str
    role: Role
    model: str
    http_address: str
    engine_address: str
    weights_address: str | None = None
    """The address of the engine that takes updates of the weights."""


async def serve_worker(settings: WorkerSettings, announce: Callable[[Ready], None]) -> None:
    """Runs a worker until SIGTERM or SIGINT, or until the control plane has drained it.

    `announce` is called once it is registered and takes requests. The first signal stops it
    gracefully: no new pairs, running requests get a few seconds. A second one stops it at once.
    After it has returned, SIGTERM is ignored: the process is about to end.

    Raises InvalidArgument, AddressInUse, NotBuilt, ControlPlaneUnavailable, InstanceExists and
    the engine's errors while it starts, and the error of a weight update that has failed while it
    was applied.
    """
    with _signals_cancel_this_task(), contextlib.suppress(asyncio.CancelledError):
        await _serve(settings, announce)


async def _serve(settings: WorkerSettings, announce: Callable[[Ready], None]) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    role = Role(settings.role)
    instance_id = settings.instance_id or f"{role}-{secrets.token_hex(4)}"
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(bind(settings.host, settings.port))
        device = device_of(settings.gpu)
        model, tokenizer = load_model(settings.model, device)
        layout, identity = kv_layout(model.config), model_identity(settings.model, model.config)
        options = engine_options({**settings.options, "host": settings.host}, None, _log)
        options["name"] = instance_id
        engine = await stack.enter_async_context(
            MeteredEngine(
                cluster_key=settings.cluster_key,
                **options,
            )
        )
        cache = stack.enter_context(
            KvCache.allocate(engine, layout, settings.blocks, gpu=settings.gpu)
        )
        runner = ModelRunner(model, tokenizer, torch_view(cache, model.config, device))
        compute = stack.enter_context(contextlib.closing(ComputeThread(on(device))))
        # The first run loads and tunes kernels; no request should pay for that.
        await compute.run(lambda: runner.generate([0] * (BLOCK_SIZE - 1), max_tokens=2))
        pool = BlockPool(settings.blocks)
        client = await stack.enter_async_context(
            ControlPlaneClient(settings.control_plane, credentials=settings.credentials)
        )
        endpoint = await stack.enter_async_context(
            # The registration sets the epoch, and so does each later one.
            KvEndpoint(
                engine,
                cache,
                pool,
                KvIdentity(
                    instance_id, settings.ticket_keys or settings.cluster_key, model=identity
                ),
                KvOptions(
                    control_plane=client,
                    connect_timeout=max(
                        _CONNECT_SECONDS, options.get("peer_timeout", DEFAULT_PEER_TIMEOUT)
                    ),
                    checksums=settings.checksums,
                ),
            )
        )
        tracer = await stack.enter_async_context(
            tracing(
                "worker",
                instance_id,
                control_plane=settings.control_plane,
                credentials=settings.credentials,
            )
        )
        on_gpu: GpuBlocks | StreamOrder | None = None
        if device.type == "cuda":
            on_gpu = StreamOrder(engine, device.index, torch.cuda.current_stream(device))
        elif settings.gpu is not None:
            on_gpu = GpuBlocks(cache, runner.cache)
        gate = VersionGate(
            compute, Policy(settings.weights_policy), settings.weights_drain, endpoint.clock
        )
        service = WorkerService(role, runner, cache, pool, endpoint, engine, compute, on_gpu, gate)
        updates = WorkerUpdates(model, gate, endpoint, client)
        if settings.weights or settings.weights_coordinator is not None:
            service.weights_address = await stack.enter_async_context(
                _weights_engine(settings, {**options, "name": f"{instance_id}-weights"}, updates)
            )
        server = HttpServer(make_app(service, tracer))
        ready = Ready(
            instance_id,
            role,
            model.config.name,
            url_of(listener),
            engine.address,
            service.weights_address,
        )
        spec = InstanceSpec(
            instance_id=instance_id,
            role=role,
            model=model.config.name,
            engine_address=engine.address,
            http_address=ready.http_address,
            layout=layout,
            num_blocks=settings.blocks,
            fabrics=engine.fabrics,
            labels={"host": socket.gethostname(), **settings.labels},
            identity=identity,
        )
        registration = Registration(
            client,
            spec,
            load=service.load,
            on_epoch=endpoint.set_epoch,
            on_role=service.take_role,
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with registration:
                updates.registration = registration
                service.on_end = registration.load_changed
                announce(ready)
                ends = (
                    asyncio.create_task(registration.drained()),
                    asyncio.create_task(updates.failed()),
                )
                try:
                    await asyncio.wait((serving, *ends), return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    await registration.advance(InstanceState.DRAINING)
                finally:
                    for each in ends:
                        each.cancel()
                server.should_exit = True
                await asyncio.shield(serving)
            gate.require(None)
        finally:
            serving.cancel()
            await asyncio.wait([serving])


@contextlib.asynccontextmanager
async def _weights_engine(
    settings: WorkerSettings, options: EngineOptions, updates: WorkerUpdates
) -> AsyncIterator[str]:
    """Yields the address that weight updates are sent to."""
    async with (
        Engine(cluster_key=settings.cluster_key, **options) as engine,
        updates.receiving(
            engine, settings.weights_coordinator, settings.weights_dtype, settings.weights_arena
        ),
    ):
        yield engine.address


def kv_layout(config: LlamaConfig) -> KvLayout:
    """Returns the layout of a model's cache in `PagedKvCache`."""
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype="float32",
        block_size=BLOCK_SIZE,
    )


def model_identity(folder: Path | None, config: LlamaConfig) -> ModelIdentity:
    """Returns the identity of a model. `folder` is its checkpoint; None is the demo model."""
    rope = {"rope_theta": config.rope_theta, **asdict(config.rope_scaling)}
    return ModelIdentity(
        checkpoint=f"seed:{SEED}" if folder is None else digest_of_folder(folder),
        model_dtype="float32",
        rope=json.dumps(rope, sort_keys=True, separators=(",", ":")),
        connector="reference/1",
    )


def on(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes a device the current one of the thread that calls it."""
    return lambda: torch.cuda.set_device(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _signals_cancel_this_task() -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 (a coroutine runs in a task)

    def cancel(*_: object) -> None:
        loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.signal(number, cancel) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        # Kubernetes sends SIGTERM to a worker that its preStop hook has drained. The loop's own
        # handlers would leave the default one in place for a moment.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, before[signal.SIGINT])
