"""The transfer engine of one SGLang instance, with the event loop that it runs on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import httpx2
import msgspec
from msgspec.structs import replace

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.connectors.api_watch import ApiWatch, engine_api
from kvxfer.connectors.sglang.rooms import Rooms
from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.connectors.transfer_engine import MakeCache, fleet_place, transfer_engine
from kvxfer.engine import Engine
from kvxfer.errors import KvxferError
from kvxfer.instances import InstanceSpec, Load, Role
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.load_meter import LoadMeter
from kvxfer.loop_thread import LoopThread
from kvxfer.model_identity import ModelIdentity
from kvxfer.unreadable import UNREADABLE

logger = logging.getLogger(__name__)

MakeSpec: TypeAlias = Callable[[Engine, KvCache], InstanceSpec]

_LOOK_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 2.0


class SchedulerLoad(msgspec.Struct, frozen=True):
    """The load of SGLang's scheduler, as /v1/loads reports it."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    """Includes requests that wait for the other side."""
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    gen_throughput: float = 0.0
    """Tokens per second of a decode server."""
    total_prefill_uncached_tokens: int = 0
    """Tokens computed since the start."""


class _Loads(msgspec.Struct, frozen=True):
    loads: tuple[SchedulerLoad, ...]


class Agent(LoopThread):
    """A thread with an event loop, which owns the engine, the KV endpoint and the rooms.

    Any thread may call begin(), run(), spawn() and close(), and read `engine_address`; `endpoint`
    and `rooms` belong to the loop.
    """

    endpoint: KvEndpoint
    rooms: Rooms
    engine_address: str

    def __init__(
        self,
        settings: BackendSettings,
        instance_id: str,
        epoch: int,
        make_cache: MakeCache,
        model: ModelIdentity,
        make_spec: MakeSpec | None = None,
        *,
        gpu: str | None = None,
        root: Path = Path("/"),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`make_spec` returns what to register if the settings name a control plane; `gpu` and
        `root` are those of `transfer_engine`."""
        super().__init__()
        self.settings = settings
        self.instance_id = instance_id
        self.epoch = epoch
        self.clock = clock
        self._gpu, self._root = gpu, root
        self._make_cache = make_cache
        self._model = model
        self._make_spec = make_spec
        self._meter = LoadMeter(clock=clock)
        self._scheduler: SchedulerLoad | None = None

    async def _serve(self) -> None:
        self.rooms = Rooms(self._decline, self.settings.lease_seconds, clock=self.clock)
        async with transfer_engine(
            self.settings,
            self._make_cache,
            instance_id=self.instance_id,
            epoch=self.epoch,
            gpu=self._gpu,
            root=self._root,
            model=self._model,
            on_offer=self.rooms.offered,
            clock=self.clock,
        ) as (engine, cache, self.endpoint):
            self.engine_address = engine.address
            self._started.set_result(None)
            if self.settings.control_plane is not None and self._make_spec is not None:
                self._begin(self._belong(self._make_spec(engine, cache)))
            await self._closing.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _belong(self, spec: InstanceSpec) -> None:
        """Keeps this instance registered. It also serves without a registration, so a failure is
        logged, and the registration is tried again."""
        while True:
            api = ApiWatch(spec.http_address, spec.model, engine="sglang", clock=self.clock)
            looking = asyncio.create_task(self._look(spec.http_address))
            try:
                async with fleet_place(
                    self.settings.control_plane,
                    spec,
                    load=lambda api=api: self._load(spec, api),  # type: ignore[misc]
                    api=api,
                ):
                    await self._closing.wait()
                    return
            except KvxferError as error:
                logger.warning("kvxfer: this instance is not registered: %s", error)
            finally:
                looking.cancel()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _look(self, http_address: str) -> None:
        """Asks for the scheduler's load until cancelled."""
        async with engine_api(http_address, "sglang") as http:
            while True:
                try:
                    answer = await http.get("/v1/loads", params={"include": "core"})
                    if answer.is_success:
                        self._take(msgspec.json.decode(answer.content, type=_Loads).loads)
                except (httpx2.HTTPError, *UNREADABLE) as error:
                    logger.debug("the load of this instance is unknown: %s", error)
                await asyncio.sleep(_LOOK_SECONDS)

    def _take(self, loads: tuple[SchedulerLoad, ...]) -> None:
        if loads:
            now, before = loads[0], self._scheduler or loads[0]
            computed = now.total_prefill_uncached_tokens - before.total_prefill_uncached_tokens
            self._meter.tokens(max(0, computed))
            self._scheduler = now

    def _load(self, spec: InstanceSpec, api: ApiWatch) -> Load:
        load = Load(
            queues=True,
            ttft_p90=api.ttft_p90,
            itl_p90=api.itl_p90,
            sent=self.endpoint.traffic(),
            models=api.models,
        )
        told = self._scheduler
        if told is None:
            return load
        free_tokens = max(0, told.max_total_num_tokens - told.num_used_tokens)
        return replace(
            load,
            running=told.num_running_reqs,
            waiting=told.num_waiting_reqs,
            free_blocks=free_tokens // spec.layout.block_size,
            tokens_per_second=told.gen_throughput
            if spec.role is Role.DECODE
            else self._meter.tokens_per_second,
        )

    def _decline(self, ticket: str, reason: str) -> None:
        self.endpoint.decline(ticket, reason)
