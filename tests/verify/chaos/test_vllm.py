"""The rules by which `make chaos SUITE=vllm` judges a disaggregated vLLM."""

from __future__ import annotations

import pytest

from verify.chaos.vllm.load import Became, Sent
from verify.chaos.vllm.naming import Cause, Fault, Naming, naming
from verify.chaos.vllm.run import Phase


def sent(began: float, ended: float, became: Became = Became.FAILED) -> Sent:
    return Sent("chaos-1", [3], [4], False, None, began, ended, failure="lost", became=became)


FREEZE = Fault("freeze prefill", began=10.0, ended=12.0, over=14.0)
WAITS = Fault("freeze decode", began=10.0, ended=12.0, over=14.0, waits=True)


@pytest.mark.parametrize(
    ("fault", "began", "logged", "ended", "seconds"),
    [
        (FREEZE, 9.0, 10.75, 11.0, 0.75),  # under way at the fault
        (FREEZE, 10.5, 11.2, 11.5, 0.7),  # sent to the frozen engine
        (FREEZE, 9.0, None, 12.5, 2.5),  # no log named it before the client got the error
        (WAITS, 9.0, 10.75, 12.5, 0.75),
        (WAITS, 10.5, None, 12.5, 0.5),  # waited until the engine continued
    ],
)
def test_a_failure_is_timed_from_its_cause(
    fault: Fault, began: float, logged: float | None, ended: float, seconds: float
) -> None:
    named = None if logged is None else (logged, "why")
    assert naming(sent(began, ended), named, fault) == Naming(pytest.approx(seconds), Cause.FAULT)


def test_a_failure_after_the_fault_is_a_stall_only_if_a_heartbeat_is_missing() -> None:
    late = sent(15.0, 17.5)
    stall = naming(late, (17.4, "peer 'prefill': no heartbeat for 755 ms"), FREEZE)
    assert stall == Naming(0.755, Cause.STALL)
    assert naming(late, (17.4, "refused"), FREEZE).cause is Cause.UNKNOWN
    assert naming(late, None, None).cause is Cause.UNKNOWN


def test_each_broken_rule_is_reported() -> None:
    right = sent(1.0, 2.0, Became.RIGHT)
    failed = sent(1.0, 2.0)
    good = Phase("kill", "kill -9 prefill", [right, failed], FREEZE, [Naming(1.0, Cause.FAULT)])
    assert list(good.broken()) == []
    for broken in (
        Phase("kill", "kill -9 prefill", [sent(1.0, 2.0, Became.WRONG)]),
        Phase("kill", "kill -9 prefill", [sent(1.0, 2.0, Became.HANGING)]),
        Phase("kill", "kill -9 prefill", [failed], FREEZE, [Naming(1.01, Cause.FAULT)]),
        Phase("kill", "kill -9 prefill", [failed], FREEZE, [Naming(0.1, Cause.UNKNOWN)]),
        Phase("crowd", "none", [right, failed], heals=True),
        Phase(
            "kill", "kill -9 prefill", [right], leaks=["decode: vllm:kv_cache_usage_perc is 0.1"]
        ),
    ):
        assert len(list(broken.broken())) == 1
