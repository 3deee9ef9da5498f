from __future__ import annotations

import random

from verify.faults.soak.flatness import Held, slopes

SECONDS = 600


def flat(samples: list[tuple[float, Held]]) -> dict[str, bool]:
    return {slope.what: slope.flat for slope in slopes(samples)}


def test_what_grows_with_time_is_told_from_what_fills_at_the_beginning() -> None:
    samples = [
        (float(at), Held(memory=40 + at * 10 / SECONDS, fds=20 + at // 60, threads=min(at, 9)))
        for at in range(SECONDS)
    ]
    [memory, *_] = slopes(samples)
    assert round(memory.per_hour) == 60
    assert round(memory.growth) == 7
    assert flat(samples) == {"memory": False, "fds": False, "threads": True}


def test_descriptors_of_workers_that_come_and_go_are_noise() -> None:
    rng = random.Random(3)
    fds, samples = 20, []
    for at in range(SECONDS):
        if rng.random() < 0.05:
            fds = 20 + rng.choice((0, 3, 6, 9, 12))
        samples.append((float(at), Held(memory=40.0, fds=fds, threads=9)))
    assert flat(samples) == {"memory": True, "fds": True, "threads": True}
