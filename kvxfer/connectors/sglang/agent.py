"""The transfer engine of one SGLang instance, with the event loop that it lives on."""

from __future__ import annotations

import asyncio

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.connectors.loop_thread import LoopThread
from kvxfer.connectors.sglang.rooms import Rooms
from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.connectors.transfer_engine import MakeCache, transfer_engine
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.model_identity import ModelIdentity


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
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.instance_id = instance_id
        self.epoch = epoch
        self.clock = clock
        self._make_cache = make_cache
        self._model = model

    async def _serve(self) -> None:
        self.rooms = Rooms(self._decline, self.settings.lease_seconds, clock=self.clock)
        async with transfer_engine(
            self.settings,
            self._make_cache,
            instance_id=self.instance_id,
            epoch=self.epoch,
            model=self._model,
            on_offer=self.rooms.offered,
            clock=self.clock,
        ) as (engine, _, self.endpoint):
            self.engine_address = engine.address
            self._started.set_result(None)
            await self._closing.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _decline(self, ticket: str, reason: str) -> None:
        self.endpoint.decline(ticket, reason)
