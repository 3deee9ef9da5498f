"""The control plane of a simulated fleet, as far as workers use it during transfers.

It keeps the block tables of brokered handshakes while their transfers are open.
"""

from __future__ import annotations

import asyncio

import msgspec

from kvxfer.errors import ControlPlaneUnavailable, UnknownBlockTable, UnknownTransfer
from kvxfer.kv.block_table import BlockTable

from .world import World

_RETRY_SECONDS = 0.01


class ControlPlane:
    """Open transfers and their block tables, as JSON."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.away = False
        self._tables: dict[str, bytes | None] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def open(self, transfer_id: str) -> None:
        self._tables[transfer_id] = None

    def end(self, transfer_id: str) -> None:
        self._tables.pop(transfer_id, None)

    async def put_block_table(self, table: BlockTable, *, deadline: float) -> None:
        await self._send(table.offer.transfer_id, msgspec.json.encode(table), deadline)

    async def block_table(
        self, transfer_id: str, *, wait_seconds: float, deadline: float
    ) -> BlockTable:
        answer = await self._send(transfer_id, None, deadline, wait_seconds)
        return msgspec.json.decode(answer, type=BlockTable)

    async def _send(
        self, transfer_id: str, table: bytes | None, deadline: float, wait_seconds: float = 0.0
    ) -> bytes:
        """Sends a request. Retries until the deadline, as ControlPlaneClient does."""
        clock = self._world.clock
        give_up = clock.now + deadline
        answer_by = clock.now + wait_seconds
        while True:
            await asyncio.sleep(self._world.latency())
            if not self.away:
                answer = self._answer(transfer_id, table)
                if answer is not None:
                    await asyncio.sleep(self._world.latency())
                    return answer
                if clock.now >= answer_by:
                    raise UnknownBlockTable(f"decode has not sent the table of {transfer_id}")
            if clock.now >= give_up:
                raise ControlPlaneUnavailable("the control plane is unavailable")
            await asyncio.sleep(_RETRY_SECONDS)

    def _answer(self, transfer_id: str, table: bytes | None) -> bytes | None:
        if transfer_id not in self._tables:
            raise UnknownTransfer(f"transfer {transfer_id} is not open")
        if table is not None:
            self._tables[transfer_id] = table
            return b""
        return self._tables[transfer_id]
