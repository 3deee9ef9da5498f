"""An endpoint with a prefill and a decode session, and a peer that knows the cluster key and sends
any messages in any order.

The engines are real. All blocks must be free at the end, whatever the peer sends.
"""

from __future__ import annotations

import asyncio
import contextlib

from kvxfer.engine import Peer
from kvxfer.errors import KvxferError, PeerLost
from kvxfer.kv.endpoint import KvEndpoint
from verify.fuzz.python.choices import Choices
from verify.fuzz.python.scene import LAYOUT, Scene, World, play

DECODERS = {
    "kvxfer/kv/message_handler.py": None,
    "kvxfer/kv/inbound.py": None,
    "kvxfer/kv/checksum.py": ["verify"],
    "kvxfer/kv/prefill_side.py": ["PrefillSide.offer", "PrefillSide.release", "PrefillSide.keep"],
    "kvxfer/kv/waiting.py": ["ExpectedOffers.expect", "ExpectedOffers.cancel"],
    "kvxfer/kv/connection.py": ["Connection.greet", "Connection.hello", "check_hello"],
}


def run(data: bytes) -> None:
    play(_Scene, data)


class _Scene(Scene):
    def __init__(self, world: World, choices: Choices) -> None:
        super().__init__(world, choices)
        self.offered = asyncio.Event()
        self.arrived = False

    async def play(self, endpoint: KvEndpoint, peer: Peer) -> None:
        greeted = self.choices.flag()
        if greeted:
            self.handler.message(peer, self.encoded(self.hello))
        if self.choices.flag():
            self.start(self.prefill(endpoint))
        if self.choices.flag():
            self.start(self.decode(endpoint))
            if greeted:
                await self.offered.wait()
        await self.settle()
        while self.choices and peer.alive:
            kind = self.choices.byte()
            if kind == 0xFF:
                await self.arrive()
            elif kind == 0xFE:
                self.handler.peer_lost(peer, PeerLost("the peer is gone"))
            else:
                self.handler.message(peer, self.message())
            await self.settle()
        if not peer.alive:
            self.handler.message(peer, self.message())  # a message that was under way
        if self.arrived:
            await asyncio.sleep(0.003)  # a thread checks the arrived bytes

    async def arrive(self) -> None:
        """Makes the peer write, with an immediate that it was offered."""
        listener = self.world.listener
        with contextlib.suppress(KvxferError, TimeoutError):
            async with asyncio.timeout(0.02):
                while not listener.offers:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                if listener.peer is not None:
                    await listener.peer.write_imm(listener.offers[-1].imm)
                    self.arrived = True

    async def prefill(self, endpoint: KvEndpoint) -> None:
        with self.pool.hold(2) as hold:
            session = await endpoint.prefill_session(self.tickets["to-peer"], hold)
            async with session:
                for layer in range(LAYOUT.num_layers):
                    session.write_layer(layer)
                await session.finish(b"tail")

    async def decode(self, endpoint: KvEndpoint) -> None:
        try:
            session = await endpoint.decode_session(
                self.tickets["from-peer"], self.world.other.address, 2
            )
        finally:
            self.offered.set()
        async with session:
            await session.wait()
            session.take().release()
