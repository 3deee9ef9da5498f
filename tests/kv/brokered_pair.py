"""Two workers that meet through a control plane."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from kvxfer.client import ControlPlaneClient
from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.instances import InstanceSpec, InstanceState, Role
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.ticket import verify_ticket
from verify.processes.control_plane import CLUSTER_KEY, RunningControlPlane

from .workers import LAYERS, LAYOUT, NUM_BLOCKS, Worker


def transfer_of(ticket: str) -> str:
    return verify_ticket(ticket, CLUSTER_KEY, now=SYSTEM_CLOCK.unix()).transfer_id


@dataclass
class BrokeredPair:
    """A prefill and a decode worker that are registered, and not connected to each other."""

    prefill: Worker
    decode: Worker
    client: ControlPlaneClient
    server: RunningControlPlane

    async def register(self, registered: Worker, role: Role) -> None:
        spec = InstanceSpec(
            instance_id=registered.endpoint.instance_id,
            role=role,
            model="m",
            engine_address=registered.engine.address,
            http_address="http://127.0.0.1:1",
            layout=LAYOUT,
            num_blocks=NUM_BLOCKS,
        )
        lease = await self.client.register(spec, state=InstanceState.READY)
        registered.endpoint.set_epoch(lease.epoch)

    async def ticket(self) -> str:
        return (await self.client.open_transfer()).ticket

    async def release(self, ticket: str) -> None:
        await self.client.release_transfer(transfer_of(ticket))

    async def begin_prefill(
        self, ticket: str, blocks: int = 3, lease_seconds: float | None = None
    ) -> PrefillSession:
        with self.prefill.pool.hold(blocks) as hold:  # the session pins them
            return await self.prefill.endpoint.prefill_session(
                ticket,
                hold,
                decode_address=self.decode.engine.address,
                lease_seconds=lease_seconds,
            )

    async def begin_decode(
        self, ticket: str, blocks: int = 3, lease_seconds: float | None = None
    ) -> DecodeSession:
        return await self.decode.endpoint.decode_session(
            ticket, None, blocks, lease_seconds=lease_seconds
        )

    async def send(self, ticket: str, rng: random.Random, blocks: int = 3) -> list[bytes]:
        with self.prefill.pool.hold(blocks) as hold:
            self.prefill.fill(hold.ids.tolist(), rng)
            async with self.prefill.endpoint.prefill_session(
                ticket, hold, decode_address=self.decode.engine.address
            ) as session:
                for layer in range(LAYERS):
                    session.write_layer(layer)
                await session.finish(b"tail")
            return self.prefill.contents(hold.ids.tolist())

    async def receive(self, ticket: str, blocks: int = 3) -> list[bytes]:
        async with await self.begin_decode(ticket, blocks) as session:
            assert await session.wait() == b"tail"
            with session.take() as hold:
                return self.decode.contents(hold.ids.tolist())

    async def connect(self, rng: random.Random) -> None:
        """Leaves both connected, by a successful transfer."""
        ticket = await self.ticket()
        sent, received = await asyncio.gather(self.send(ticket, rng), self.receive(ticket))
        assert sent == received

    def all_free(self) -> bool:
        return self.prefill.pool.num_free == self.decode.pool.num_free == NUM_BLOCKS
