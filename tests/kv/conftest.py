from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from .workers import Worker, worker


@pytest_asyncio.fixture
async def pair(fabric: str) -> AsyncIterator[tuple[Worker, Worker]]:
    """A prefill and a decode worker; after the test every block of both is free."""
    async with worker("p", fabric) as prefill, worker("d", fabric) as decode:
        yield prefill, decode
