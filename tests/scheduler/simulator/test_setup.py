"""Options become a fleet and its policies, or one error that names the option."""

from __future__ import annotations

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.scheduler.scaling.trace import Load
from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.simulator.policies import capacity
from kvxfer.scheduler.simulator.settings import SimulationSettings
from kvxfer.scheduler.simulator.setup import prepare


def test_a_fleet_is_split_so_that_both_sides_reach_their_limits_together():
    model = WorkerModel()
    can = capacity(model, Load(1.0, 2000, 250), itl_target=0.05)
    # A batch of 105 takes 50 ms per token; a prompt takes 0.1 s.
    assert (can.batch, can.prefill) == (pytest.approx(105), pytest.approx(10))
    assert can.decode == pytest.approx(105 / 0.05 / 250)
    prefill, decode = can.split(1000)
    assert prefill + decode == 1000
    assert prefill * can.prefill == pytest.approx(decode * can.decode, rel=0.01)
    assert capacity(model, Load(1.0, 30_000, 250), itl_target=0.05).batch == pytest.approx(
        20_000 * 16 / 30_125
    )


def test_the_load_is_a_part_of_what_the_fleet_can_serve():
    simulation, (policy,) = prepare(SimulationSettings(instances=50, load=0.4, hours=24), {})
    can = capacity(simulation.model, Load(0.0, 2000, 250), itl_target=0.05)
    rate = simulation.workload.expected(0, 86_400) / 86_400
    assert rate == pytest.approx(0.4 * can.of(policy.prefill, policy.decode), rel=0.05)


def test_policies_side_by_side(tmp_path):
    scaling, pairing = tmp_path / "scaling.toml", tmp_path / "near.toml"
    scaling.write_text("interval = 7.0\n[prefill]\nmax = 5\n")
    pairing.write_text("[weights]\ndistance = 3.0\n")
    texts = ("fixed=3:4", "scaling=default", f"scaling={scaling},pairing={pairing}")
    _, (fixed, default, files) = prepare(SimulationSettings(instances=80, policies=texts), {})
    assert (fixed.prefill, fixed.decode, fixed.scaling) == (3, 4, None)
    assert default.scaling is not None
    assert default.scaling.prefill.max + default.scaling.decode.max == 80
    assert default.scaling.prefill.min <= default.prefill <= default.scaling.prefill.max
    assert files.scaling is not None
    assert (files.scaling.interval, files.prefill) == (7.0, 5)
    assert files.scorer is not None
    assert files.scorer.pair(2, 0, 0) == 6.0


@pytest.mark.parametrize(
    ("asked", "workers", "words"),
    [
        ({"load": 0.5, "rate": 3.0}, {}, "--load and --rate are two names for one thing"),
        ({"rate": 1e9}, {}, "--rate is 1e+09, or --load and --instances come to that; 1,000,000"),
        ({"rate": -1.0}, {}, "--rate is -1.0; write a number above 0"),
        ({"ttft_target": 0.0}, {}, "--slo-ttft is 0.0; write a number above 0"),
        ({"hours": float("inf")}, {}, "--hours is inf; write"),
        ({}, {"prefill_tokens_per_second": 0.0}, "--prefill-speed is 0.0; write a number above 0"),
        ({}, {"prefill_overhead": -1.0}, "--prefill-overhead is -1.0; write a number, 0 or more"),
        ({}, {"kv_blocks": 10}, "--kv-blocks is 10, 160 tokens, and the mean prompt has 2000"),
        ({"policies": ("best",)}, {}, "--policy best: 'best' is no policy; write fixed, fixed="),
        ({"policies": ("fixed=0:3",)}, {}, "'0:3' are no counts; write PREFILL:DECODE"),
        ({"policies": ("fixed,scaling=default",)}, {}, "'scaling=default' comes too often"),
        ({"policies": ("scaling=nowhere.toml",)}, {}, "nowhere.toml cannot be read"),
    ],
)
def test_invalid_options_are_refused_by_name(asked, workers, words):
    with pytest.raises(InvalidArgument) as refused:
        prepare(SimulationSettings(instances=10, **asked), workers)
    assert words in str(refused.value)


def test_a_trace_replaces_the_generated_load(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    simulation, _ = prepare(SimulationSettings(instances=2, trace=trace), {})
    assert simulation.workload.expected(0, 10) == 1
    with pytest.raises(InvalidArgument, match=r"--rate is 3.0, but --trace says what comes in"):
        SimulationSettings(instances=2, trace=trace, rate=3.0)
