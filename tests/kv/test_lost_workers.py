from __future__ import annotations

from kvxfer.errors import PeerLost, PeerTimeout
from kvxfer.kv.waiting import LostWorkers
from tests.virtual_time import VirtualClock


def test_losses_after_a_ticket_was_issued_are_known_by_rank() -> None:
    clock = VirtualClock()
    lost, before = LostWorkers(clock), clock.unix() - 1
    lost.add(("d", 1), 0, PeerLost("first"))
    lost.add(("d", 1), 1, PeerTimeout("second"))
    found = lost.since(("d", 1), before)
    assert {rank: (type(error), str(error)) for rank, error in found.items()} == {
        0: (PeerLost, "first"),
        1: (PeerTimeout, "second"),
    }
    assert lost.since(("d", 2), before) == {}
    assert lost.since(("d", 1), clock.unix() + 1) == {}
    assert lost.since(("d", 1), 0.0) == {}


def test_the_worker_that_was_lost_longest_ago_is_forgotten_first() -> None:
    clock = VirtualClock()
    lost, before = LostWorkers(clock, 2), clock.unix() - 1
    error = PeerLost("it exited")
    for name in ("a", "b", "a", "c"):
        lost.add((name, 1), 0, error)
    assert len(lost) == 2
    assert [name for name in "abc" if lost.since((name, 1), before)] == ["a", "c"]


class WrongClock(VirtualClock):
    wrong = 0.0

    def unix(self) -> float:
        return super().unix() + self.wrong


def test_a_clock_that_was_wrong_when_a_worker_was_lost_does_no_harm() -> None:
    clock = WrongClock()
    lost, now = LostWorkers(clock), clock.unix()
    clock.wrong = 3600
    lost.add(("d", 1), 0, PeerLost("it exited"))
    clock.wrong = 0
    assert lost.since(("d", 1), now - 1)
    assert not lost.since(("d", 1), now + 1)
