from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from verify.polling import PATIENCE

from .workers import Worker, worker


@pytest.fixture(autouse=True)
def causes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the symptom of an end may arrive long before its cause."""
    monkeypatch.setattr("kvxfer.kv.prefill_session._CAUSE_SECONDS", PATIENCE / 2)


@pytest_asyncio.fixture
async def pair(fabric: str) -> AsyncIterator[tuple[Worker, Worker]]:
    """A prefill and a decode worker; after the test every block of both is free."""
    async with worker("p", fabric) as prefill, worker("d", fabric) as decode:
        yield prefill, decode
