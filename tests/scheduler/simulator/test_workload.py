"""The generated day: the same requests in every run, as many as its curve says."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.scheduler.simulator.workload import GeneratedDay


def all_of(day, start, end):
    pieces = list(day.between(start, end))
    return np.concatenate([piece.at for piece in pieces]), np.concatenate(
        [piece.prompt for piece in pieces]
    )


def test_a_part_of_the_day_has_the_same_requests_as_the_whole_day():
    day = GeneratedDay(hours=1, requests_per_second=20, seed=3)
    whole, prompts = all_of(day, 0, 3600)
    part, its = all_of(day, 1003.5, 1219.25)
    inside = (whole >= 1003.5) & (whole < 1219.25)
    assert np.array_equal(part, whole[inside])
    assert np.array_equal(its, prompts[inside])
    assert np.all(np.diff(whole) >= 0)


def test_as_many_requests_come_as_the_curve_says():
    day = GeneratedDay(hours=2, requests_per_second=30, seed=5)
    for start in range(0, 7200, 1200):
        at, _ = all_of(day, start, start + 1200)
        expected = day.expected(start, start + 1200)
        assert abs(len(at) - expected) < 5 * np.sqrt(expected)


def test_lengths_have_the_means_that_were_asked_for():
    day = GeneratedDay(
        hours=1, requests_per_second=50, prompt_tokens=3000, output_tokens=100, bursts=False
    )
    pieces = list(day.between(0, 3600))
    prompts = np.concatenate([piece.prompt for piece in pieces])
    outputs = np.concatenate([piece.output for piece in pieces])
    assert prompts.mean() == pytest.approx(3000, rel=0.02)
    assert outputs.mean() == pytest.approx(100, rel=0.02)


def test_the_day_swings_around_its_mean_and_bursts_come_on_top():
    quiet = GeneratedDay(hours=24, requests_per_second=10, seed=1, bursts=False)
    assert quiet.expected(0, 86_400) == pytest.approx(864_000, rel=1e-3)
    assert quiet.load(14 * 3600, 14 * 3600 + 60).requests_per_second == pytest.approx(14, rel=0.01)
    assert quiet.load(2 * 3600, 2 * 3600 + 60).requests_per_second == pytest.approx(6, rel=0.01)
    bursts = GeneratedDay(hours=24, requests_per_second=10, seed=1)
    ratios = [
        bursts.expected(at, at + 30) / quiet.expected(at, at + 30) for at in range(0, 86_400, 30)
    ]
    assert min(ratios) == pytest.approx(1)
    assert 1.3 < max(ratios) <= 2
    assert 0 < sum(ratio > 1.2 for ratio in ratios) < 0.2 * len(ratios)


def test_another_seed_is_another_day():
    one, two = (GeneratedDay(hours=0.1, requests_per_second=5, seed=seed) for seed in (1, 2))
    assert not np.array_equal(all_of(one, 0, 360)[0][:10], all_of(two, 0, 360)[0][:10])
