"""Instances, and their worker processes: the real engine front, cache, pool and endpoint on a
simulated loop.

The process may be stopped, killed, or leave in good order.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from kvxfer.engine import Engine
from kvxfer.errors import KvxferError
from kvxfer.instances import Role
from kvxfer.kv.block_pool import BlockIds, BlockPool, BlockState
from kvxfer.kv.cache import KvCache, permute_on_host
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.layout import HeadOrder, KvLayout
from verify.simulation.clock import ProcessClock

from .contents import Contents
from .control_plane import ControlPlane
from .loop import SimulatedLoop
from .offers import Offers
from .world import World

KEY = b"0123456789abcdef0123456789abcdef"
_FOLLOW_SECONDS = 0.02
TRANSFER: contextvars.ContextVar[str] = contextvars.ContextVar("transfer")
"""The id of the request that a task serves."""


class OwnedPool(BlockPool):
    """A pool that records which transfer has each block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.owners: dict[int, str] = {}

    def _pop(self, count: int, to: BlockState, owned: BlockIds) -> BlockIds:
        ids = super()._pop(count, to, owned)
        self.owners.update(dict.fromkeys(ids[len(owned) :].tolist(), TRANSFER.get()))
        return ids

    def _push(self, ids: BlockIds) -> None:
        super()._push(ids)
        for block in ids.tolist():
            del self.owners[block]


@dataclass(eq=False)
class Instance:
    """An instance: ranks with a common id and, at any time, a common epoch."""

    name: str
    role: Role
    layout: KvLayout
    epoch: int = 1
    ranks: list[Process] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return all(rank.runs and rank.ready for rank in self.ranks)


class Process:
    """One rank of an instance, from its start to its end. Events that lets() gets wait while it is
    stopped."""

    engine: Engine
    cache: KvCache
    pool: OwnedPool
    endpoint: KvEndpoint
    contents: Contents
    base_address: int
    block_bytes: int
    plane_bytes: int

    def __init__(
        self,
        world: World,
        control_plane: ControlPlane,
        instance: Instance,
        layout: KvLayout,
        start: int,
    ) -> None:
        self.instance = instance
        self.name = f"{instance.name}.{layout.rank}"
        self.incarnation = f"{self.name}~{start}"
        self.epochs = [instance.epoch]
        self.alive = True
        self.silent = False
        """True if its host has died too: connections are not even refused."""
        self.runs = True
        """True while it is alive and not stopped."""
        self.ready = False
        self.stopped_at: float | None = None
        self.died_at: float | None = None
        self.woke_at = 0.0
        self._world, self._control_plane = world, control_plane
        self._layout = layout
        self._waiting: list[Callable[[], None]] = []
        seconds = world.rng.choice([0.0, 1e-4, 5e-3])
        self.clock = ProcessClock(world.clock)
        self.loop = SimulatedLoop(self.clock.monotonic, lambda: world.rng.uniform(0, seconds))
        self.offers = Offers(lambda token, why: self.endpoint.decline(token, why))
        self.following: asyncio.Task[None] | None = None
        """The task by which a rank gets its epoch from the first rank."""
        self._leave = asyncio.Event()
        self._life = self.loop.create_task(self._live())

    @property
    def address(self) -> str:
        return f"kvx://{self.name}/{self.incarnation}"

    def lets(self, event: Callable[[], None]) -> bool:
        if self.alive and self.stopped_at is not None:
            self._waiting.append(event)
        return self.runs

    def stop(self) -> None:
        """Stops it, as SIGSTOP does. Its clock keeps running."""
        self.runs = False
        self.stopped_at = self._world.clock.now

    def wake(self) -> None:
        """Resumes it, as SIGCONT does. First handles the events of the meantime, in order."""
        self.runs = True
        self.stopped_at = None
        self.woke_at = self._world.clock.now
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            if self.lets(event):
                event()

    def kill(self, silently: bool) -> None:
        """Kills it, as SIGKILL does; with `silently` its host dies too."""
        self.alive = self.runs = self.ready = False
        self.silent = silently
        self.died_at = self._world.clock.now
        self._waiting.clear()

    def leave(self) -> None:
        """Ends in good order."""
        self._leave.set()

    @property
    def left(self) -> bool:
        return self._life.done()

    def bury(self) -> None:
        """Frees the resources of a dead process, without a message to its peers."""
        while tasks := self.loop.tasks:
            for task in tasks:
                task.cancel()
            self.loop.run_due()
        self.loop.close()

    async def _live(self) -> None:
        async with Engine(cluster_key=KEY, name=self.name) as engine:
            self.engine = engine
            with KvCache.allocate(
                engine, self._layout, self._world.num_blocks, permute=self._permute
            ) as cache:
                self.cache = cache
                self.pool = OwnedPool(cache.num_blocks)
                self.contents = Contents(cache)
                self.block_bytes = self._layout.part_bytes
                self.plane_bytes = self.block_bytes * cache.num_blocks
                self.base_address = cache.planes[0][0].region.address
                async with KvEndpoint(
                    engine,
                    cache,
                    self.pool,
                    KvIdentity(
                        self.instance.name, KEY, 0 if self._layout.rank else self.epochs[-1]
                    ),
                    KvOptions(
                        lease_seconds=self._world.lease_seconds,
                        checksums=self._world.checksums is self.instance.role,
                        control_plane=cast(Any, self._control_plane),
                        on_offer=self.offers.told,
                        clock=self.clock,
                    ),
                ) as endpoint:
                    self.endpoint = endpoint
                    if self._layout.rank:
                        self.following = self.loop.create_task(self._follow())
                    else:
                        self.ready = True
                    await self._leave.wait()
                    self.ready = False
                    if self.following is not None:
                        self.following.cancel()
                        await asyncio.wait([self.following])
                counts = self.pool.counts()
                held = counts[BlockState.OFFERED] + counts[BlockState.RECEIVING]
                # With several groups a request takes its blocks before its session, and frees them.
                self._world.require(
                    not held or self._layout.num_groups > 1,
                    f"{self.name} has closed its endpoint; {held} blocks are still offered",
                )

    async def _follow(self) -> None:
        """Gets the epoch from the first rank, over any connection to it."""
        while True:
            lost = asyncio.Event()
            try:
                peer = await self.endpoint.follow(self.instance.ranks[0].address)
            except KvxferError:
                await asyncio.sleep(_FOLLOW_SECONDS)
                continue
            self._world.counts["epoch followed"] += 1
            self.ready = not self._leave.is_set()
            peer.on_lost(lambda _, lost=lost: lost.set())  # type: ignore[misc]
            await lost.wait()

    def _permute(self, cache: KvCache, blocks: BlockIds, arrived: HeadOrder) -> None:
        """Reorders heads in a thread. The blocks must still have one owner."""
        owners = {self.pool.owners.get(block) for block in blocks.tolist()}
        with contextlib.suppress(Exception):
            self._world.require(
                len(owners) == 1 and None not in owners,
                f"heads of {self.name}'s blocks {blocks.tolist()} are reordered, which belong to "
                f"{sorted(map(str, owners))}",
            )
        permute_on_host(cache, blocks, arrived)
        self._world.counts["heads put in order"] += 1
