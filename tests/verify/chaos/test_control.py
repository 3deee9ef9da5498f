"""The rule by which `make chaos SUITE=control` judges a cluster."""

from __future__ import annotations

from verify.chaos.control.acts import Done
from verify.chaos.control.load import Sent
from verify.chaos.control.run import CALM, Outcome, Phase

KILLED = "http://h:4000"
KILL = Done(killed_decode=KILLED)


def sent(seconds: float = 1.0, tokens: int = 16, failure: str | None = None) -> Sent:
    return Sent(
        streamed=True,
        began=0.0,
        seconds=seconds,
        tokens=list(range(tokens)),
        right=failure is None,
        failure=failure,
    )


def broken(
    *requests: Sent,
    done: Done = KILL,
    leaked: int = 0,
    reserved: int = 0,
    continues: bool = False,
) -> list[str]:
    acted = Phase("kill -9 decode", requests, done=done)
    return Outcome([Phase(CALM, [sent()]), acted], reserved, leaked, continues).broken()


def test_a_stream_of_the_killed_decode_worker_may_fail_after_its_first_token():
    assert broken(sent(tokens=1, failure=f"the worker at {KILLED} does not answer")) == []


def test_with_continuing_a_stream_may_not_fail():
    lost = sent(tokens=1, failure=f"the worker at {KILLED} does not answer")
    assert broken(lost, continues=True) == ["kill -9 decode: 1 requests failed that should not"]


def test_requests_in_a_fail_over_may_take_longer_by_the_outage():
    assert broken(sent(seconds=8.0), done=Done(outage_seconds=2.0)) == []
    assert len(broken(sent(seconds=8.1), done=Done(outage_seconds=2.0))) == 1


def test_a_request_may_not_fail_before_its_first_token():
    lost = broken(sent(tokens=0, failure=f"the worker at {KILLED} does not answer"))
    assert lost == ["kill -9 decode: 1 requests failed that should not"]


def test_a_stream_of_another_worker_may_not_fail():
    assert broken(sent(tokens=3, failure="the worker at http://h:40001 does not answer"))


def test_wrong_answers_slow_ones_and_leaks_are_reported():
    wrong = sent()
    wrong.right, wrong.wrong = False, True
    assert len(broken(wrong)) == 1
    assert broken(sent(seconds=6.0)) == []
    assert len(broken(sent(seconds=6.01))) == 1
    assert len(broken(leaked=1)) == len(broken(reserved=1)) == 1
