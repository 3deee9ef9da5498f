"""The transfer engine of one SGLang instance, with the event loop that it lives on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvxfer.connectors.loop_thread import LoopThread
from kvxfer.connectors.sglang.rooms import Rooms
from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.engine import Engine
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint


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
        make_cache: Callable[[Engine], KvCache],
    ) -> None:
        super().__init__()
        self.settings = settings
        self.instance_id = instance_id
        self.epoch = epoch
        self._make_cache = make_cache

    async def _serve(self) -> None:
        settings = self.settings
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(
                Engine(
                    cluster_key=settings.cluster_key,
                    name=self.instance_id,
                    host=settings.host,
                    fabrics=settings.fabrics,
                    cpus=settings.cpus,
                    peer_timeout=settings.peer_timeout,
                )
            )
            cache = stack.enter_context(self._make_cache(engine))
            self.rooms = Rooms(self._decline, settings.lease_seconds)
            self.endpoint = await stack.enter_async_context(
                KvEndpoint(
                    engine,
                    cache,
                    None,
                    instance_id=self.instance_id,
                    epoch=self.epoch,
                    ticket_key=settings.ticket_keys or settings.cluster_key,
                    lease_seconds=settings.lease_seconds,
                    on_offer=self.rooms.offered,
                )
            )
            self.engine_address = engine.address
            self._started.set_result(None)
            await self._closing.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _decline(self, ticket: str, reason: str) -> None:
        self.endpoint.decline(ticket, reason)
