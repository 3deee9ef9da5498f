from __future__ import annotations

import random
from collections.abc import Callable

from verify.soak.flatness import Held, Slope, memory_slope


def judged(memory: Callable[[int], float], seconds: int = 600) -> Slope | None:
    return memory_slope([(float(at), Held(memory(at), 20, 9)) for at in range(seconds)])


def test_memory_that_grows_is_distinguished_from_memory_that_fills_at_first() -> None:
    slope = judged(lambda at: 40 + at / 60)
    assert slope is not None
    assert round(slope.per_hour) == 60
    assert round(slope.growth) == 7
    assert not slope.flat
    filling = judged(lambda at: 40 + min(at, 170) / 10)
    assert filling is not None
    assert filling.flat


def test_noise_is_not_growth() -> None:
    rng = random.Random(3)
    slope = judged(lambda _: 40 + rng.gauss(0, 9))
    assert slope is not None
    assert slope.flat


def test_a_run_that_is_too_short_is_not_judged() -> None:
    assert judged(lambda at: 40 + at, seconds=240) is None
