"""Bundled load traces through the decision: tests/data/scaling has the expected decisions.

After an intended change of rules or policy, `python -m tests.scheduler.scaling.test_replay` writes
the tables again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy
from kvxfer.scheduler.scaling.policy_file import read_bundled_policy
from kvxfer.scheduler.scaling.replay import Replay, replay
from kvxfer.scheduler.scaling.trace import BUNDLED, Load, Trace, read_trace
from kvxfer.scheduler.scaling.worker_model import WorkerModel

TABLES = Path(__file__).parents[2] / "data" / "scaling"


def run(name: str) -> Replay:
    policy = read_bundled_policy()
    return replay(read_trace(name), policy, policy.worker_model)


def table(result: Replay) -> Iterator[str]:
    """Yields a line per change: second, role, counts, and the rule and bounds that decided."""
    for step in result.steps:
        for role in (step.decision.prefill, step.decision.decode):
            if role.direction != "hold":
                rule = max(role.demands, key=lambda demand: demand.workers).rule
                bounds = " ".join(clip.bound for clip in role.clips)
                counts = f"{role.current}->{role.wanted}"
                yield f"{step.at:6.0f} {role.role:7} {counts:6} {rule:8} {bounds}".rstrip()


@pytest.mark.parametrize("name", BUNDLED)
def test_decisions_of_the_bundled_traces(name):
    assert list(table(run(name))) == (TABLES / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "ttft", "itl", "prefill_hours", "decode_hours"),
    [
        ("step", 0.940, 0.899, 4.21, 5.94),
        ("day", 0.948, 1.0, 59.93, 85.26),
        ("burst", 0.865, 0.835, 7.57, 8.04),
    ],
)
def test_results_of_the_bundled_traces(name, ttft, itl, prefill_hours, decode_hours):
    result = run(name)
    assert result.within_ttft == pytest.approx(ttft, abs=0.001)
    assert result.within_itl == pytest.approx(itl, abs=0.001)
    assert result.prefill_worker_hours == pytest.approx(prefill_hours, abs=0.05)
    assert result.decode_worker_hours == pytest.approx(decode_hours, abs=0.05)


def test_replays_are_the_same_each_time():
    assert asdict(run("step")) == asdict(run("step"))


def test_the_queue_grows_while_workers_start():
    """One worker computes 1000 tokens/s; 3000 come in, so 2000 queue up each second."""
    policy = ScalingPolicy(
        interval=1,
        step_up=10,
        prefill=RolePolicy(tokens_per_second=1000, utilisation=1, requests=None, latency=None),
    )
    model = WorkerModel(prefill_tokens_per_second=1000, start_seconds=30)
    load = Load(30, 100, 10)
    result = replay(Trace("t", (0, 60), (load, load)), policy, model)
    assert result.steps[0].decision.prefill.wanted == 3
    before, after = result.steps[28], result.steps[31]
    # The queue divided by the speed, a prompt's own 0.1 s, and the M/D/1 wait at 95 %.
    assert before.ttft == pytest.approx(58 + 0.1 + 2.1875, abs=0.01)
    assert after.ttft == pytest.approx(60 / 3 + 0.1 + 2.1875, abs=0.01)
    assert (result.within_ttft, result.requests) == (None, 1800)


def test_requests_that_do_not_fit_the_kv_cache_wait():
    """Ten blocks hold 160 tokens: two requests of 80."""
    model = WorkerModel(kv_blocks=10, itl_base=0.1, itl_per_request=0.05)
    policy = ScalingPolicy(
        prefill=RolePolicy(latency=None), decode=RolePolicy(max=1, latency=0.15, requests=1)
    )
    load = Load(5, 60, 40)
    result = replay(Trace("t", (0, 60), (load, load)), policy, model)
    last = result.steps[-1]
    assert last.itl == pytest.approx(0.2), "a batch of two, however many wait"
    assert last.decision.decode.clips[-1].because.endswith("max is 1")
    assert result.within_itl is not None
    assert result.within_itl < 0.1


if __name__ == "__main__":
    for name in BUNDLED:
        (TABLES / f"{name}.txt").write_text("\n".join(table(run(name))) + "\n")
