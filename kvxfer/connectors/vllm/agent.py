"""The transfer engine of one vLLM worker process, with the event loop that it runs on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from kvxfer.cached_blocks import CachedBlocks
from kvxfer.client import Registration
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.connectors.api_watch import ApiWatch
from kvxfer.connectors.cores import leave_openmp_cores
from kvxfer.connectors.transfer_engine import MakeCache, fleet_place, transfer_engine
from kvxfer.connectors.vllm.kv_events import CacheChanges
from kvxfer.connectors.vllm.plan import Counted
from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.engine import Engine, Peer, Watcher
from kvxfer.errors import DeadlineExceeded, InvalidArgument, KvxferError
from kvxfer.instances import InstanceSpec, InstanceState, Load, Role
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.load_meter import LoadMeter
from kvxfer.loop_thread import START_SECONDS, LoopThread
from kvxfer.model_identity import ModelIdentity
from kvxfer.prefix_hashes import TOKENS_PER_HASH
from kvxfer.tracing.setup import tracing

logger = logging.getLogger(__name__)

# vLLM shows its own loggers' info messages, and only warnings of others.
_NICS_LOG: Final = logging.getLogger("vllm.kvxfer")
_POLL_SECONDS: Final = 0.25
_STREAM_POLL_SECONDS: Final = 0.0005


class Agent(LoopThread):
    """A thread with an event loop, which owns the engine, the KV endpoint and the registration.

    Any thread may call start(), join(), run(), spawn() and close(), and set `counted`; `endpoint`
    belongs to the loop.
    Each rank of an instance has an agent. The first rank's registers the instance, as joining, and
    as ready once its HTTP API answers; the others get the epoch from it.
    """

    endpoint: KvEndpoint
    engine_address: str
    gpu: int | None = None
    """CUDA's number of the GPU that has the cache; None for host memory."""
    counted: Counted = Counted()
    """The last counts from the engine's scheduler."""

    def __init__(
        self,
        settings: ConnectorSettings,
        pci_address: str | None = None,
        *,
        root: Path = Path("/"),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`pci_address` and `root` are `gpu` and `root` of `transfer_engine`."""
        super().__init__()
        self.clock = clock
        self._settings = settings
        self._pci_address, self._root = pci_address, root
        self._ranks: asyncio.Future[tuple[str, ...]] = self._loop.create_future()
        self._joined: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._awaited.append(self._joined)
        self._cached = CachedBlocks()
        self._meter = LoadMeter(clock=clock)
        self._metered = Counted()
        self._api: ApiWatch
        self._make_cache: MakeCache
        self._model: ModelIdentity
        self._registration: Registration | None = None
        self._engine: Engine
        self._abandoned = False
        self._was_ready = False  # before it was suspended

    def start(self, make_cache: MakeCache, model: ModelIdentity) -> str:
        """Starts the engine for a cache of this model and returns its address. Raises the error
        that prevents it."""
        self._make_cache = make_cache
        self._model = model
        self.begin()
        return self.engine_address

    def join(self, rank_addresses: Sequence[str]) -> None:
        """Returns when the instance is registered, with the engine addresses of all its ranks in
        their order. Raises the error that prevents it."""
        self._loop.call_soon_threadsafe(self._ranks.set_result, tuple(rank_addresses))
        self._joined.result(START_SECONDS)

    def cached(self, changes: CacheChanges) -> None:
        """Reports changes of the prefix cache to the control plane with the next heartbeat."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._note_cached, changes)

    def _note_cached(self, changes: CacheChanges) -> None:
        if changes.cleared:
            self._cached.clear()
        self._cached.remove(changes.removed)
        self._cached.add(changes.added)

    @property
    def lost(self) -> bool:
        """True if no transfer can begin any more; none is under way then."""
        return self._abandoned or self.ended

    def abandon(self) -> None:
        """Ends all transfers, even if the loop hangs. Any thread; returns when nothing is under
        way. The first rank also deregisters the instance, unless the loop hangs: then its lease
        expires."""
        if not self._abandoned:
            self._engine.native.close()
            self._abandoned = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop)

    def watcher(self) -> Watcher:
        """Returns a new word that writes may wait for. If the cache is on a GPU, its streams count
        the word up. Any thread."""
        return self._engine.watcher(gpu=self.gpu)

    async def reached(self, watcher: Watcher, value: int) -> None:
        """Returns once streams of the GPU have counted the word up to the value. Raises
        DeadlineExceeded if they have not within the lease."""
        begun = self.clock.monotonic()
        while watcher.value < value:
            if self.clock.monotonic() - begun > self._settings.lease_seconds:
                raise DeadlineExceeded(
                    f"the forward's stream on GPU {self.gpu} has not reached the blocks for "
                    f"{self._settings.lease_seconds:g} s; see what its kernels wait for"
                )
            await asyncio.sleep(_STREAM_POLL_SECONDS)

    async def take_weights(self, version: int) -> None:
        """Changes the version of the weights. Returns when no transfer of the previous version is
        left, and the control plane, if available, has the new one. Loop only. Raises
        InvalidArgument if the version is not greater than the previous one."""
        if version <= self._model.weights_version:
            raise InvalidArgument(
                f"weights version {version} is not above {self._model.weights_version}; pass a "
                "greater one with each update"
            )
        self._model = replace(self._model, weights_version=version)
        await self.endpoint.set_model(self._model)
        if self._registration is not None:
            self._cached.clear()
            await self._registration.take_model(self._model)

    async def suspend(self) -> None:
        """Ends all transfers before the cache's memory is released. None is left when this returns,
        and none begins until resume(). Loop only."""
        await self.endpoint.suspend("it sleeps; wake it up first")
        if self._registration is not None:
            self._cached.clear()
            self._was_ready |= await self._registration.withdraw()

    async def resume(self) -> None:
        """Allows transfers again, once the memory is restored. Loop only. Raises what
        Engine.register() raises."""
        await self.endpoint.resume()
        if self._registration is not None and self._was_ready:
            self._was_ready = False
            await self._registration.advance(InstanceState.READY)

    def _main(self) -> None:
        leave_openmp_cores()
        super()._main()

    def _stop(self) -> None:
        super()._stop()
        self._ranks.cancel()

    async def _serve(self) -> None:
        async with (
            tracing(
                "vllm",
                self._settings.instance_id,
                control_plane=self._settings.control_plane,
                optional=True,
            ) as tracer,
            transfer_engine(
                self._settings,
                self._make_cache,
                instance_id=self._settings.instance_id,
                gpu=self._pci_address,
                root=self._root,
                log=_NICS_LOG,
                model=self._model,
                tracer=tracer,
                clock=self.clock,
            ) as (engine, cache, self.endpoint),
        ):
            self._engine, self.engine_address = engine, engine.address
            self.gpu = cache.gpu
            self._started.set_result(None)
            addresses = await self._ranks
            if cache.layout.rank == 0:
                await self._belong(self._spec(engine, cache, addresses))
            else:
                await self._follow(addresses[0])

    async def _belong(self, spec: InstanceSpec) -> None:
        """Keeps this instance registered until the agent is closed."""
        settings = self._settings
        self._cached.limit = spec.num_blocks * spec.layout.block_size // TOKENS_PER_HASH
        self._api = ApiWatch(settings.http_address, settings.model, engine="vllm", clock=self.clock)
        async with fleet_place(
            settings.control_plane,
            spec,
            load=self._load,
            api=self._api,
            asleep=lambda: self.endpoint.suspended,
            on_epoch=self.endpoint.set_epoch,
            cached=self._cached,
        ) as self._registration:
            self._joined.set_result(None)
            await self._closing.wait()

    def _load(self) -> Load:
        now, before = self.counted, self._metered
        self._metered = now
        tokens = "output_tokens" if self._settings.role is Role.DECODE else "prompt_tokens"
        self._meter.requests(now.requests - before.requests)
        self._meter.tokens(getattr(now, tokens) - getattr(before, tokens))
        return Load(
            # For a drain, sends of requests that have ended are work, too.
            running=now.running or (0 if now.waiting else len(self._tasks)),
            waiting=now.waiting,
            free_blocks=now.free_blocks,
            cached_blocks=now.cached_blocks,
            queues=True,
            requests_per_second=self._meter.requests_per_second,
            tokens_per_second=self._meter.tokens_per_second,
            ttft_p90=self._api.ttft_p90,
            itl_p90=self._api.itl_p90,
            sent=self.endpoint.traffic(),
            models=self._api.models,
        )

    async def _follow(self, first_rank: str) -> None:
        """Takes the instance's epoch from its first rank until the agent is closed."""
        following = asyncio.create_task(self._keep_following(first_rank))
        await self._closing.wait()
        following.cancel()

    async def _keep_following(self, first_rank: str) -> None:
        while True:
            try:
                peer = await self.endpoint.follow(first_rank)
            except KvxferError as error:
                logger.warning("the first rank of this instance cannot be reached: %s", error)
            else:
                if not self._joined.done():
                    self._joined.set_result(None)
                await _lost(peer)
            await asyncio.sleep(_POLL_SECONDS)

    def _spec(self, engine: Engine, cache: KvCache, addresses: tuple[str, ...]) -> InstanceSpec:
        settings = self._settings
        return InstanceSpec(
            instance_id=settings.instance_id,
            role=settings.role,
            model=settings.model,
            engine_address=engine.address,
            http_address=settings.http_address,
            layout=cache.layout,
            num_blocks=cache.num_blocks,
            fabrics=engine.fabrics,
            rank_addresses=addresses if len(addresses) > 1 else (),
            labels={"host": socket.gethostname(), **settings.labels},
            identity=self._model,
            aggregates=True,
        )


async def _lost(peer: Peer) -> None:
    lost = asyncio.Event()
    peer.on_lost(lambda _: lost.set())
    await lost.wait()
