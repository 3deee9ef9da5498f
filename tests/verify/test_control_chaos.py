"""The rule that `make chaos-control` holds a cluster to."""

from __future__ import annotations

from verify.faults.control.load import Sent
from verify.faults.control.run import CALM, Outcome, Phase

KILLED = "http://h:4000"


def sent(seconds: float = 1.0, tokens: int = 16, failure: str | None = None) -> Sent:
    return Sent(
        streamed=True,
        began=0.0,
        seconds=seconds,
        tokens=list(range(tokens)),
        right=failure is None,
        failure=failure,
    )


def broken(*requests: Sent, leaked: int = 0, reserved: int = 0) -> list[str]:
    acted = Phase("kill -9 decode", requests, killed_decode=KILLED)
    return Outcome([Phase(CALM, [sent()]), acted], reserved, leaked).broken()


def test_a_stream_of_the_killed_decode_worker_may_fail_after_its_first_token():
    assert broken(sent(tokens=1, failure=f"the worker at {KILLED} does not answer")) == []


def test_a_request_may_not_fail_before_its_first_token():
    lost = broken(sent(tokens=0, failure=f"the worker at {KILLED} does not answer"))
    assert lost == ["kill -9 decode: 1 requests failed that should not"]


def test_a_stream_of_another_worker_may_not_fail():
    assert broken(sent(tokens=3, failure="the worker at http://h:40001 does not answer"))


def test_a_wrong_answer_a_slow_one_and_what_is_left_are_told():
    wrong = sent()
    wrong.right, wrong.wrong = False, True
    assert len(broken(wrong)) == 1
    assert broken(sent(seconds=6.0)) == []
    assert len(broken(sent(seconds=6.01))) == 1
    assert len(broken(leaked=1)) == len(broken(reserved=1)) == 1
