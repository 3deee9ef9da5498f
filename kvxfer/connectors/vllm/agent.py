"""The transfer engine of one vLLM worker process, with the event loop that it lives on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Final

import httpx

from kvxfer.client import ControlPlaneClient
from kvxfer.connectors.loop_thread import LoopThread
from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.engine import Engine
from kvxfer.instances import InstanceSpec, InstanceState, Load
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.registration import Registration

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.25


class Agent(LoopThread):
    """A thread with an event loop, which owns the engine, the KV endpoint and the registration.

    Any thread may call start(), run(), spawn() and close(); `endpoint` belongs to the loop. The
    instance is registered as joining, and as ready once its HTTP API answers.
    """

    endpoint: KvEndpoint
    engine_address: str

    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__()
        self._settings = settings
        self._make_cache: Callable[[Engine], KvCache]

    def start(self, make_cache: Callable[[Engine], KvCache]) -> None:
        """Returns when the instance is registered. Raises what keeps it from that."""
        self._make_cache = make_cache
        self.begin()

    async def _serve(self) -> None:
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(
                Engine(
                    cluster_key=settings.cluster_key,
                    name=settings.instance_id,
                    host=settings.host,
                    fabrics=settings.fabrics,
                    cpus=settings.cpus,
                    peer_timeout=settings.peer_timeout,
                )
            )
            self.engine_address = engine.address
            cache = stack.enter_context(self._make_cache(engine))
            client = await stack.enter_async_context(ControlPlaneClient(settings.control_plane))
            self.endpoint = await stack.enter_async_context(
                KvEndpoint(
                    engine,
                    cache,
                    None,
                    instance_id=settings.instance_id,
                    epoch=0,
                    ticket_key=settings.ticket_keys or settings.cluster_key,
                    lease_seconds=settings.lease_seconds,
                )
            )
            registration = await stack.enter_async_context(
                Registration(
                    client,
                    self._spec(engine, cache),
                    state=InstanceState.JOINING,
                    load=lambda: Load(running=len(self._tasks)),
                    on_epoch=self.endpoint.set_epoch,
                )
            )
            self._started.set_result(None)
            announcing = asyncio.create_task(self._announce(registration))
            await self._closing.wait()
            announcing.cancel()

    def _spec(self, engine: Engine, cache: KvCache) -> InstanceSpec:
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
            labels={"host": socket.gethostname(), **settings.labels},
        )

    async def _announce(self, registration: Registration) -> None:
        """Says that the instance is ready, once its API answers."""
        async with httpx.AsyncClient(timeout=2.0) as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await http.get(self._settings.http_address + "/health")
                    if answer.is_success:
                        break
                await asyncio.sleep(_POLL_SECONDS)
        await registration.advance(InstanceState.READY)
        logger.info("instance %s is ready", self._settings.instance_id)
