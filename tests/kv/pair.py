"""Two endpoints over steered engines, and a transfer between them."""

from __future__ import annotations

import asyncio
from typing import Any

from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.layout import KvLayout
from kvxfer.ticket import Ticket, sign_ticket
from tests.virtual_time import loop_clock

from .steered import Engine, Network, Region
from .workers import LAYOUT

KEY = b"k" * 32
POOL = 6


class Side:
    def __init__(self, name: str, layout: KvLayout, control_plane: Any = None) -> None:
        self.engine = Engine(name)
        engine: Any = self.engine
        self.cache = KvCache.allocate(engine, layout, POOL)
        self.pool = BlockPool(POOL)
        self.endpoint = KvEndpoint(
            engine,
            self.cache,
            self.pool,
            KvIdentity(name, KEY, 1),
            KvOptions(control_plane=control_plane, clock=loop_clock()),
        )

    def block_of(self, region: Region, offset: int) -> int:
        """The block at an offset into a region, which is a granted range or a whole cache."""
        plane = POOL * self.cache.layout.part_bytes
        at = region.address + offset - self.cache.planes[0][0].region.address
        return at % plane // self.cache.layout.part_bytes


class Pair:
    """Two endpoints; their ticket is valid for `seconds`."""

    def __init__(self, seconds: float = 60.0, control_plane: Any = None) -> None:
        self.prefill = Side("prefill", LAYOUT, control_plane)
        self.decode = Side("decode", LAYOUT, control_plane)
        self.network = Network(self.prefill.engine, self.decode.engine)
        expires = self.prefill.endpoint.clock.unix() + seconds
        self.token = sign_ticket(Ticket("t", "r", "prefill", 1, "decode", 1, expires), KEY)

    def meet(self) -> None:
        """Connects them, and delivers each side's HELLO."""
        self.network.join()
        self.deliver()

    def deliver(self) -> None:
        """Delivers everything that is in flight."""
        while steps := self.network.steps():
            steps[0]()

    async def settle(self) -> None:
        """Delivers until both sides have answered each other; no time passes."""
        for _ in range(10):
            self.deliver()
            await asyncio.sleep(0)
