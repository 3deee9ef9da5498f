"""The control plane of a simulated fleet, as far as workers speak to it in mid-transfer:
block tables of brokered handshakes, which it keeps while a transfer is open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvxfer.errors import ControlPlaneUnavailable, UnknownBlockTable, UnknownTransfer

if TYPE_CHECKING:
    from kvxfer.client.calls import Call

    from .network import Network

T = TypeVar("T")

_RETRY_SECONDS = 0.01


class ControlPlane:
    """Open transfers and their block tables, as JSON."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.away = False
        self._tables: dict[str, bytes | None] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def open(self, transfer_id: str) -> None:
        self._tables[transfer_id] = None

    def end(self, transfer_id: str) -> None:
        self._tables.pop(transfer_id, None)

    async def send(self, call: Call[T], *, deadline: float | None = None) -> T:
        """What ControlPlaneClient.send() does, of any process: tries again until the deadline."""
        clock = self.network.clock
        give_up = clock.now + (deadline or 2.0)
        answer_by = clock.now + call.wait_seconds
        transfer_id = call.path.split("/")[3]
        while True:
            await asyncio.sleep(self.network.latency())
            if not self.away:
                answer = self._answer(transfer_id, call.body)
                if answer is not None:
                    await asyncio.sleep(self.network.latency())
                    return call.read(answer)
                if clock.now >= answer_by:
                    raise UnknownBlockTable(f"decode has not sent the table of {transfer_id}")
            if clock.now >= give_up:
                raise ControlPlaneUnavailable("the control plane is away")
            await asyncio.sleep(_RETRY_SECONDS)

    def _answer(self, transfer_id: str, body: Any) -> bytes | None:
        if transfer_id not in self._tables:
            raise UnknownTransfer(f"transfer {transfer_id} is not open")
        if body is not None:
            self._tables[transfer_id] = msgspec.json.encode(body)
            return b""
        return self._tables[transfer_id]
