"""Rates of delivered bytes, of transfers under way and of those that have ended."""

from __future__ import annotations

from kvxfer.instances import Traffic
from kvxfer.kv.counts import TrafficMeter
from tests.virtual_time import VirtualClock


class Moving:
    """A transfer that has delivered the given bytes."""

    def __init__(self, **delivered: int) -> None:
        self.to = delivered

    def _delivered(self):
        for to, nbytes in self.to.items():
            yield to, "tcp", nbytes


def rate(to: str, bytes_per_second: float) -> Traffic:
    return Traffic(to=to, fabric="tcp", bytes_per_second=bytes_per_second)


def test_bytes_count_once_whether_a_transfer_goes_on_or_ends():
    clock = VirtualClock()
    meter = TrafficMeter(seconds=10, clock=clock)
    moving, ends = Moving(d=100, e=30), Moving(d=500)
    clock.advance(2)
    assert meter.rates([moving, ends]) == (rate("d", 300), rate("e", 15))
    moving.to["d"] = 300
    ends.to["d"] = 600
    meter.end(ends)
    clock.advance(2)
    assert meter.rates([moving]) == (rate("d", 225), rate("e", 7.5))


def test_bytes_older_than_the_window_do_not_count():
    clock = VirtualClock()
    meter = TrafficMeter(seconds=10, clock=clock)
    moving = Moving(d=1000)
    clock.advance(5)
    assert meter.rates([moving]) == (rate("d", 200),)
    clock.advance(8)
    moving.to["d"] = 1080
    assert meter.rates([moving]) == (rate("d", 1080 / 13),)
    clock.advance(2)  # the first sample is now as old as the window
    assert meter.rates([moving]) == (rate("d", 8),)
    clock.advance(10)
    assert meter.rates([moving]) == ()


def test_ranks_of_one_instance_are_one_and_the_most_comes_first():
    meter = TrafficMeter(seconds=10, clock=VirtualClock())

    class Ranks:
        def _delivered(self):
            yield "d", "verbs", 4
            yield "d", "verbs", 6
            yield "e", "tcp", 50

    told = meter.rates([Ranks()])
    assert [(each.to, each.fabric, each.bytes_per_second) for each in told] == [
        ("e", "tcp", 50),
        ("d", "verbs", 10),
    ]


def test_rates_of_a_large_fleet_are_reported_in_part():
    meter = TrafficMeter(seconds=10, clock=VirtualClock())
    told = meter.rates([Moving(**{f"d{n}": n for n in range(1, 101)})])
    assert [each.to for each in told] == [f"d{n}" for n in range(100, 36, -1)]
