"""The training ranks that have connected to an inference rank, by plan and number."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvxfer.weights.transfer.messages import Hello

if TYPE_CHECKING:
    from kvxfer.engine import Peer


class Greeted:
    """The training ranks that have sent HELLO, by plan and number."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, int], Peer] = {}
        self._waiting: dict[tuple[str, int], asyncio.Future[Peer]] = {}

    def add(self, hello: Hello, peer: Peer) -> None:
        key = (hello.plan_id, hello.number)
        self._peers = {at: known for at, known in self._peers.items() if known is not peer}
        self._peers[key] = peer
        waiting = self._waiting.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(peer)

    def remove(self, peer: Peer) -> None:
        self._peers = {at: known for at, known in self._peers.items() if known is not peer}

    async def get(self, plan_id: str, number: int) -> Peer:
        key = (plan_id, number)
        if key in self._peers:
            return self._peers[key]
        waiting = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
        return await asyncio.shield(waiting)
