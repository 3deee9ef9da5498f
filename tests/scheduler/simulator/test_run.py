"""Whole simulations: what holds at any load, and windows compared with every request."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from kvxfer.instances import Role
from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy
from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.scoring import WeightedScorer, Weights
from kvxfer.scheduler.simulator.policies import Policy
from kvxfer.scheduler.simulator.run import Simulation, simulate
from kvxfer.scheduler.simulator.workload import Arrivals, GeneratedDay, RecordedRequests

MODEL = WorkerModel(prefill_overhead=0.01)


def day(rate, *, hours=0.1, seed=2):
    return GeneratedDay(hours=hours, requests_per_second=rate, seed=seed, bursts=False)


def run(workload, policy, *, model=MODEL, **settings):
    return simulate(Simulation(workload=workload, model=model, **settings), policy)


def test_a_single_request_takes_its_prefill_the_last_layer_and_a_step():
    model = WorkerModel(prefill_overhead=0.01, kv_bytes_per_token=1e6, nic_gb_per_second=20, nics=2)
    arrivals = Arrivals(np.array([0.0, 100.0]), np.array([2000, 2000]), np.array([100, 100]))
    work = RecordedRequests("two", arrivals, tokens_per_hash=None)
    result = run(work, Policy("one pair", 1, 1), model=model)
    prefill, network = 0.01 + 2000 / 20_000, 2000 * 1e6 / 40e9
    assert result.ttft[50] == pytest.approx(prefill + network / 32 + 0.0084)
    assert result.itl[99] == pytest.approx(0.0084)
    assert result.good == 1.0
    assert result.prefill_busy == pytest.approx(2 * prefill / 101)


def test_a_network_slower_than_prefill_determines_the_time():
    model = WorkerModel(prefill_overhead=0.01, nic_gb_per_second=0.1)
    arrivals = Arrivals(np.array([0.0, 0.5]), np.array([2000, 2000]), np.array([1, 1]))
    work = RecordedRequests("two", arrivals, tokens_per_hash=None)
    result = run(work, Policy("one pair", 1, 1), model=model)
    network = 2000 * 131_072 / 0.1e9
    assert result.ttft[50] == pytest.approx(network + 0.0084)
    assert result.ttft[99] == pytest.approx(2 * network - 0.5 + 0.0084)


def test_windows_agree_with_the_simulation_of_every_request():
    policy = Policy("fixed", 20, 22)
    whole = run(day(150), policy)
    sampled = run(day(150), policy, detail=8_000)
    assert (whole.sampled, sampled.sampled) == (False, True)
    assert sampled.simulated < 0.3 * whole.simulated
    assert sampled.requests == pytest.approx(whole.requests, rel=0.03)
    for percent in (50, 90):
        assert sampled.ttft[percent] == pytest.approx(whole.ttft[percent], rel=0.1)
        assert sampled.itl[percent] == pytest.approx(whole.itl[percent], rel=0.15)
    assert sampled.output_tokens_per_second == pytest.approx(
        whole.output_tokens_per_second, rel=0.06
    )
    assert sampled.good == pytest.approx(whole.good, abs=0.02)


def test_requests_beyond_capacity_wait_in_windows_too():
    """Beyond capacity no request gets a token in time; the queue carries over between windows."""
    policy = Policy("fixed", 4, 8)
    whole = run(day(100, hours=0.05), policy)
    sampled = run(day(100, hours=0.05), policy, detail=4_000)
    assert whole.good < 0.5
    assert sampled.good < 0.5
    assert whole.late + whole.refused > 0.1
    assert sampled.late + sampled.refused > 0.1


def test_requests_are_all_accounted_for_while_workers_come_and_go():
    role = RolePolicy(min=1, max=12, tokens_per_second=18_000, utilisation=0.7)
    scaling = ScalingPolicy(
        stable_down=30, cooldown_down=20, prefill=role, decode=RolePolicy(min=1, max=12)
    )
    model = WorkerModel(prefill_overhead=0.01, start_seconds=15)
    work = day(20, hours=0.15)
    result = run(work, Policy("scaled", 1, 1, scaling), model=model)
    counts = [point.prefill_workers for point in result.course]
    assert max(counts) >= 2
    assert result.actions
    assert all(1 <= action.after <= 12 for action in result.actions)
    assert result.prefill_hours < 12 * 0.15
    # Nothing was lost on a worker that left: each request was served, refused or given up.
    assert result.simulated == round(result.requests)
    assert result.refused + result.late < 0.5
    roles = {action.role for action in result.actions}
    assert roles <= {Role.PREFILL.value, Role.DECODE.value}


def test_windows_follow_the_autoscaler_up_and_down():
    role = RolePolicy(min=1, max=20, tokens_per_second=18_000, utilisation=0.7)
    decode = RolePolicy(min=1, max=20, tokens_per_second=2_000)
    scaling = ScalingPolicy(step_down=4, prefill=role, decode=decode)
    rises_and_falls = GeneratedDay(hours=24, requests_per_second=40, seed=1, bursts=False)
    policy = Policy("scaled", 3, 5, scaling)
    result = run(rises_and_falls, policy, detail=2_000)
    counts = [point.decode_workers for point in result.course]
    assert counts.index(max(counts)) in range(12, 18)
    assert max(counts) > 1.5 * counts[2]
    assert counts[-1] < max(counts)
    assert {action.after > action.before for action in result.actions} == {True, False}
    assert result.prefill_hours == pytest.approx(
        sum(point.prefill_workers for point in result.course), rel=0.1
    )
    assert result.good > 0.5


def test_the_same_seed_gives_the_same_results():
    policy = Policy("fixed", 3, 3)
    one, two = (run(day(15, hours=0.02), policy) for _ in range(2))
    assert asdict(one) == asdict(two)


def test_pairing_finds_cached_prefixes_and_weights_change_what_it_finds():
    count = 600
    draw = np.random.default_rng(1)
    kinds = draw.integers(8, size=count)
    hashes = tuple(
        (*(int(kind) * 100 + depth for depth in range(8)), 10_000 + number)
        for number, kind in enumerate(kinds)
    )
    arrivals = Arrivals(
        np.sort(draw.uniform(0, 600, count)),
        np.full(count, 9 * 512),
        np.full(count, 20),
        hashes,
    )
    work = RecordedRequests("prefixes", arrivals, tokens_per_hash=512)
    near = run(work, Policy("prefix", 8, 4))
    blind = run(work, Policy("blind", 8, 4, scorer=WeightedScorer(Weights(prefix=0.0))))
    assert near.cached > 0.8
    assert near.cached > blind.cached
    assert near.ttft[50] < blind.ttft[90]
