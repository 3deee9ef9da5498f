from __future__ import annotations

import os
import random

import pytest


@pytest.fixture
def rng() -> random.Random:
    """Random choices of a test; a failure shows the seed, KVXFER_TEST_SEED repeats it."""
    seed = int(os.environ.get("KVXFER_TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"KVXFER_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(params=["local", "tcp"])
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)
