"""The waiters for news of one transfer: its block table, or its end."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Arrivals:
    """The waiters in one event loop. A waiter reads the state, then waits, then reads again."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    async def wait(self, transfer_id: str, seconds: float) -> None:
        """Returns with the next news of the transfer, or after `seconds`."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(transfer_id, set()).add(news)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await news
        finally:
            waiting = self._waiting.get(transfer_id)
            if waiting is not None:
                waiting.discard(news)
                if not waiting:
                    del self._waiting[transfer_id]

    def announce(self, transfer_id: str) -> None:
        for news in self._waiting.pop(transfer_id, ()):
            if not news.done():
                news.set_result(None)

    def announce_all(self) -> None:
        for transfer_id in list(self._waiting):
            self.announce(transfer_id)
