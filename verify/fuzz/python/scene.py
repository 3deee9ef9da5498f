"""Real engines: the endpoint's, and that of a peer that knows the cluster key and sends any bytes.

Targets with an endpoint share this: a lasting world, and a scene in it for each run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from kvxfer.engine import Engine, EngineHandler, Peer
from kvxfer.errors import ConnectFailed, KvxferError
from kvxfer.kv import prefill_session
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Checksum,
    Done,
    Expect,
    Hello,
    Keep,
    Message,
    Offer,
    Refused,
    Release,
    decode,
    encode,
)
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.kv_versions import OLDEST
from kvxfer.layout import KvLayout
from kvxfer.ticket import Ticket, sign_ticket
from verify.fuzz.python.choices import Choices

KEY = b"0123456789abcdef0123456789abcdef"
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_size=4, dtype="float16", block_size=4)
BLOCKS = 8
LEASE = 30.0


class Listener:
    """The peer's handler. It keeps the immediates that were offered to the peer."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.offers: list[Offer] = []

    def peer_up(self, peer: Peer) -> None:
        self.peer = peer

    def message(self, peer: Peer, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, Offer):
            self.offers.append(message)

    def peer_lost(self, peer: Peer, error: KvxferError) -> None:
        self.peer = None


@dataclass
class World:
    loop: asyncio.AbstractEventLoop
    engine: Engine
    other: Engine
    cache: KvCache
    errors: list[dict[str, Any]]
    listener: Listener


@functools.cache
def _world() -> World:
    loop = asyncio.new_event_loop()
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))

    async def make() -> World:
        # The timeout is long: here engines stop only for a debugger or on a busy machine.
        engine = Engine(cluster_key=KEY, name="fuzzed", fabrics=("tcp",), peer_timeout=60.0)
        other = Engine(cluster_key=KEY, name="peer", fabrics=("tcp",), peer_timeout=60.0)
        other.handler = listener = Listener()
        await engine.__aenter__()
        await other.__aenter__()
        cache = KvCache.allocate(engine, LAYOUT, BLOCKS)
        return World(loop, engine, other, cache, errors, listener)

    return loop.run_until_complete(make())


def play(scene: type[Scene], data: bytes) -> None:
    """Runs a target once."""
    world = _world()
    # The time that a failed session waits for decode's message about the failure.
    with mock.patch.object(prefill_session, "_CAUSE_SECONDS", 0.005):
        world.loop.run_until_complete(scene(world, Choices(data)).run())
    if world.errors:
        raise AssertionError(f"unhandled: {world.errors[:]}, {world.errors.clear()}")


class Scene(ABC):
    """One run. All blocks must be free at the end, whatever the peer sends."""

    def __init__(self, world: World, choices: Choices) -> None:
        self.world, self.choices = world, choices
        self.pool = BlockPool(BLOCKS)
        self.tasks: list[asyncio.Task[Any]] = []
        expires = time.time() + 60
        self.tickets = {
            name: sign_ticket(Ticket(name, "request", *pair, expires), KEY)
            for name, pair in {
                "to-peer": ("fuzzed", 1, "peer", 1),
                "from-peer": ("peer", 1, "fuzzed", 1),
                "early": ("fuzzed", 1, "peer", 1),
                "bearer": ("fuzzed", 1, "", 0),
                "foreign": ("someone", 1, "else", 1),
            }.items()
        }
        self.names = [*self.tickets, "unknown"]
        world.listener.offers.clear()

    @abstractmethod
    async def play(self, endpoint: KvEndpoint, peer: Peer) -> None:
        """Runs the events between the endpoint and its peer."""

    def endpoint(self, **options: Any) -> KvEndpoint:
        return KvEndpoint(
            self.world.engine,
            self.world.cache,
            self.pool,
            KvIdentity("fuzzed", KEY, 1),
            KvOptions(
                lease_seconds=LEASE,
                max_early_offers_per_peer=2,
                on_offer=lambda ticket: None,
                **options,
            ),
        )

    async def run(self) -> None:
        peer = await self._connect()
        async with self.endpoint() as endpoint:
            await self.play(endpoint, peer)
        for task in self.tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, KvxferError):
                raise outcome
        self.pool.check()
        assert self.pool.num_free == BLOCKS, self.pool.counts()

    async def _connect(self) -> Peer:
        """Connects to the peer. Retries, as the handshake's deadline (5 s) may be too short while
        many fuzzers run."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(ConnectFailed):
                    return await self.world.engine.connect(self.world.other.address, timeout=30)
                await asyncio.sleep(0.1)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    @property
    def handler(self) -> EngineHandler:
        handler = self.world.engine.handler
        assert handler is not None
        return handler

    # --- the peer's messages

    def message(self) -> bytes:
        choices = self.choices
        makers: tuple[Callable[[], Message], ...] = (
            self.hello,
            self.offer,
            lambda: Release(self.name(), self.ticket(), choices.text()),
            lambda: Keep(self.name(), self.ticket(), choices.number()),
            lambda: Expect(self.name(), self.ticket()),
            lambda: Accepted(self.name()),
            lambda: Refused(
                self.name(), choices.one_of(("lease-expired", "layout-mismatch", "?")), "why"
            ),
            lambda: Done(self.name(), choices.integer(), choices.bytes(), self.checksum()),
            lambda: Cancel(self.name(), choices.text()),
            lambda: Cancelled(self.name(), choices.integer()),
        )
        kind = choices.below(len(makers) + 1)
        if kind == len(makers):
            return choices.bytes()
        return self.encoded(makers[kind])

    def encoded(self, make: Callable[[], Message]) -> bytes:
        try:
            return encode(make())
        except OverflowError:  # no sender can encode this
            return b""

    def name(self) -> str:
        return self.choices.one_of(self.names)

    def ticket(self) -> str:
        name = self.name()
        return self.tickets.get(name, "a.b.c")

    def checksum(self) -> Checksum | None:
        choices = self.choices
        return Checksum(choices.integer(), choices.integer()) if choices.flag() else None

    def hello(self) -> Hello:
        choices = self.choices
        layout = LAYOUT
        if choices.flag():
            layout = replace(
                LAYOUT,
                block_size=choices.one_of((4, 2, 8, 5)),
                tp_size=choices.one_of((1, 2)),
                pp_size=choices.one_of((1, 2)),
                num_kv_heads=choices.one_of((2, 4)),
                order=choices.one_of(("NHD", "HND")),
                kv=choices.one_of(("separate", "interleaved")),
            )
        strides = ((layout.part_bytes,) * len(layout.parts),) * layout.layers_per_rank
        if choices.byte() == 0xFF:
            strides = ((choices.integer(),) * choices.below(3),) * choices.below(4)
        return Hello(
            version=OLDEST if choices.byte() != 0xFF else choices.integer(),
            instance_id=choices.one_of(("peer", "peer", "peer", "other")),
            epoch=1 if choices.byte() != 0xFF else choices.integer(),
            layout=layout,
            num_blocks=BLOCKS if choices.byte() != 0xFF else choices.integer(),
            block_strides=strides,
            permutes=choices.flag(),
            checksums=choices.flag(),
        )

    def offer(self) -> Offer:
        choices = self.choices
        name = self.name()
        count = choices.one_of((2, 2, 2, 1, 3))
        blocks = b"".join(choices.byte().to_bytes(1, "little") + b"\0\0\0" for _ in range(count))
        descriptor = self.world.cache.planes[0][0].region.descriptor
        grant = choices.bytes() if choices.flag() else descriptor
        return Offer(
            transfer_id=name,
            ticket=self.tickets.get(name, "a.b.c") if choices.flag() else self.ticket(),
            blocks=blocks if choices.byte() != 0xFF else choices.bytes(),
            grants=(grant,) * choices.one_of((4, 4, 4, 2, 0, 8)),
            imm=choices.integer(),
            lease_seconds=choices.number(),
            first_block=0 if choices.byte() != 0xFF else choices.integer(),
        )
