"""Rates and latencies of the last minute."""

from __future__ import annotations

import pytest

from kvxfer.load_meter import LoadMeter
from tests.virtual_time import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def meter(clock: VirtualClock) -> LoadMeter:
    return LoadMeter(seconds=60, clock=clock)


def test_nothing_is_measured_before_anything_happens(meter):
    assert (meter.requests_per_second, meter.tokens_per_second) == (0, 0)
    assert (meter.ttft_p90, meter.itl_p90) == (None, None)


def test_rates_are_over_the_window(meter, clock):
    for _ in range(120):
        with meter.request(tokens=100):
            clock.advance(0.5)
    assert meter.requests_per_second == pytest.approx(2)
    assert meter.tokens_per_second == pytest.approx(200)


def test_a_young_worker_is_measured_over_its_life(meter, clock):
    meter.requests(1)
    meter.tokens(50)
    clock.advance(5)
    assert meter.requests_per_second == pytest.approx(1 / 5)
    assert meter.tokens_per_second == pytest.approx(10)


def test_events_older_than_the_window_are_forgotten(meter, clock):
    meter.requests(1)
    meter.tokens(7)
    meter.first_token(3.0)
    meter.next_tokens(0.2)
    clock.advance(61)
    assert (meter.requests_per_second, meter.tokens_per_second) == (0, 0)
    assert (meter.ttft_p90, meter.itl_p90) == (None, None)


@pytest.mark.parametrize("seconds", [0.0, 5.0, 61.0])
def test_a_request_that_fails_is_no_load(meter, clock, seconds):
    """Holds even if its arrival is forgotten before it fails."""
    with pytest.raises(ValueError), meter.request(tokens=100):
        assert meter.tokens_per_second == 100
        clock.advance(seconds)
        raise ValueError
    assert (meter.requests_per_second, meter.tokens_per_second) == (0, 0)


def test_p90_is_what_nine_of_ten_do_not_exceed(meter):
    for seconds in range(10, 0, -1):
        meter.first_token(float(seconds))
    meter.next_tokens(0.5)
    assert (meter.ttft_p90, meter.itl_p90) == (9.0, 0.5)
