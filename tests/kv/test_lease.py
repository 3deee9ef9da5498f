from __future__ import annotations

import math

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.kv.session_state import Lease
from tests.virtual_time import loop_clock, passes


async def test_a_lease_expires_once_after_its_seconds() -> None:
    clock = loop_clock()
    begun = clock.monotonic()
    expired: list[float] = []
    lease = Lease(5.0, lambda: expired.append(clock.monotonic() - begun), clock)
    assert lease.remaining() == 5.0
    await passes(4.0)
    assert (expired, lease.remaining()) == ([], 1.0)
    await passes(60.0)
    assert expired == [5.0]
    assert lease.remaining() == 0.001


async def test_a_renewed_lease_ends_later_and_an_ended_one_never() -> None:
    expired: list[str] = []
    renewed = Lease(2.0, lambda: expired.append("renewed"), loop_clock())
    ended = Lease(2.0, lambda: expired.append("ended"), loop_clock())
    await passes(1.0)
    renewed.renew(60.0)
    assert renewed.remaining() == renewed.seconds == 60.0
    ended.end()
    ended.end()
    await passes(59.0)
    assert expired == []
    await passes(2.0)
    assert expired == ["renewed"]


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan])
async def test_a_lease_needs_a_finite_time(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="a lease of"):
        Lease(seconds, lambda: None, loop_clock())
