from __future__ import annotations

import pytest

from kvxfer.web.rate_limit import RateLimiter
from tests.virtual_time import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_burst_then_the_rate(clock):
    limiter = RateLimiter(10, 3, clock)
    assert [limiter.wait_seconds("a") for _ in range(3)] == [0, 0, 0]
    assert limiter.wait_seconds("a") == pytest.approx(0.1)
    clock.advance(0.1)
    assert limiter.wait_seconds("a") == 0
    assert limiter.wait_seconds("a") == pytest.approx(0.1)


def test_refused_request_costs_nothing(clock):
    limiter = RateLimiter(10, 1, clock)
    limiter.wait_seconds("a")
    for _ in range(100):
        assert limiter.wait_seconds("a") == pytest.approx(0.1)


def test_caller_that_retries_when_told_to_is_admitted(clock):
    limiter = RateLimiter(7, 2, clock)
    admitted = 0
    for _ in range(1000):
        wait = limiter.wait_seconds("a")
        admitted += not wait
        clock.advance(wait)
    passed = clock.monotonic() - VirtualClock().monotonic()
    assert admitted == pytest.approx(7 * passed + 2, abs=1)


def test_callers_do_not_share(clock):
    limiter = RateLimiter(1, 1, clock)
    assert limiter.wait_seconds("a") == limiter.wait_seconds("b") == 0
    assert limiter.wait_seconds("a") == limiter.wait_seconds("b") == 1


def test_a_quiet_caller_has_its_burst_again(clock):
    limiter = RateLimiter(10, 5, clock)
    for _ in range(2):
        assert [limiter.wait_seconds("a") for _ in range(5)] == [0] * 5
        assert limiter.wait_seconds("a") > 0
        clock.advance(60)


def test_memory_is_bounded_and_forgets_the_quietest(clock):
    limiter = RateLimiter(1, 1, clock, max_callers=100)
    for number in range(1000):
        limiter.wait_seconds("busy")
        limiter.wait_seconds(number)
    assert len(limiter) == 100
    assert limiter.wait_seconds("busy") > 0
    assert limiter.wait_seconds(0) == 0
