from __future__ import annotations

import asyncio
import math

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.kv.lease import Lease
from tests.virtual_time import loop_clock

from .workers import SOON


async def test_a_lease_expires_once_after_its_seconds() -> None:
    expired: asyncio.Queue[float] = asyncio.Queue()
    clock = loop_clock()
    start = clock.monotonic()
    lease = Lease(0.05, lambda: expired.put_nowait(clock.monotonic()), clock)
    assert 0 < lease.remaining() <= 0.05
    end = await asyncio.wait_for(expired.get(), SOON)
    assert end - start >= 0.045
    assert lease.remaining() == 0.001
    assert expired.empty()


async def test_a_renewed_lease_ends_later_and_an_ended_one_never() -> None:
    expired: list[str] = []
    renewed = Lease(0.02, lambda: expired.append("renewed"), loop_clock())
    ended = Lease(0.02, lambda: expired.append("ended"), loop_clock())
    witness: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    renewed.renew(60)
    assert renewed.remaining() > 30
    assert renewed.seconds == 60
    ended.end()
    ended.end()
    witness_lease = Lease(0.04, lambda: witness.set_result(None), loop_clock())
    await asyncio.wait_for(witness, SOON)
    assert expired == []
    renewed.end()
    witness_lease.end()


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan])
async def test_a_lease_needs_a_finite_time(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="a lease of"):
        Lease(seconds, lambda: None, loop_clock())
