"""The waits of commands, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.cli.instances import _until
from kvxfer.cli.trace import _when_whole
from kvxfer.client import calls
from kvxfer.client.answers import Answer
from kvxfer.errors import ControlPlaneUnavailable, DeadlineExceeded, UnknownTrace
from kvxfer.traces import Trace, TraceSpan
from tests.virtual_time import VirtualClock


class Traced:
    """A control plane whose spans, named by numbers, arrive at given times; one is the root."""

    def __init__(self, clock: VirtualClock, arrivals: dict[float, int], root: int = 1) -> None:
        self._clock = clock
        self._began = clock.unix()
        self._arrivals = arrivals
        self._root = root

    def trace(self, request_id: str) -> Trace:
        there = [span for at, span in self._arrivals.items() if at <= self.passed]
        if not there:
            raise UnknownTrace(request_id)
        return Trace(request_id=request_id, spans=tuple(map(self._span, there)))

    @property
    def passed(self) -> float:
        return self._clock.unix() - self._began

    def _span(self, number: int) -> TraceSpan:
        return TraceSpan(
            trace_id="t",
            span_id=str(number),
            parent_id=None if number == self._root else str(self._root),
            name="a",
            service="worker",
            start=self._began - 1,
            end=self._began,
        )


@pytest.mark.parametrize(
    ("arrivals", "seconds"),
    [
        ({0.0: 1}, 3.0),
        ({0.0: 1, 2.0: 2}, 5.0),  # a late span begins the quiet time again
        ({1.0: 2, 2.0: 1}, 5.0),
        ({0.0: 2}, 10.0),  # the root never comes
    ],
)
def test_a_trace_is_whole_when_nothing_was_added_for_three_seconds(
    arrivals: dict[float, int], seconds: float
) -> None:
    clock = VirtualClock()
    client: Any = Traced(clock, arrivals)
    found = _when_whole(client, "r", 10.0, clock)
    assert client.passed == pytest.approx(seconds)
    assert len(found.spans) == len(arrivals)


def test_a_trace_that_does_not_arrive_in_time_is_unknown() -> None:
    clock = VirtualClock()
    client: Any = Traced(clock, {60.0: 1})
    with pytest.raises(UnknownTrace):
        _when_whole(client, "r", 5.0, clock)
    assert client.passed == pytest.approx(5.0)


class Counted:
    """A control plane with one more instance for each second."""

    def __init__(self, clock: VirtualClock, away_until: float = 0.0) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        self._away_until = away_until

    @property
    def passed(self) -> float:
        return self._clock.monotonic() - self._began

    def ask(self, _: object) -> Answer[Any]:
        if self.passed < self._away_until:
            raise ControlPlaneUnavailable("it is unavailable")
        return Answer(("one",) * int(self.passed), None)


def test_instances_are_waited_for_until_the_count_is_reached() -> None:
    clock = VirtualClock()
    client: Any = Counted(clock, away_until=2.5)
    assert len(_until(client, calls.instances(), 3, 10.0, clock).value) == 3
    assert client.passed == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("away_until", "said"), [(0.0, "the last count was 4"), (9.0, "it is unavailable")]
)
def test_instances_are_not_waited_for_beyond_the_deadline(away_until: float, said: str) -> None:
    clock = VirtualClock()
    client: Any = Counted(clock, away_until)
    with pytest.raises(DeadlineExceeded, match=rf"not 9 such instances within 4.2 s: {said}"):
        _until(client, calls.instances(), 9, 4.2, clock)
    assert 3.7 < client.passed <= 4.2
