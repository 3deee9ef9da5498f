"""Steps of real ranks, each a process: what they dispatch and combine is compared with float64."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any, Final

import pytest

from tests.moe.conftest import WHOLE, Drive
from tests.moe.scenario import FP8, Scenario

pytestmark = pytest.mark.native

ROUNDS: Final = int(os.environ.get("KVXFER_MOE_ROUNDS", 1000 if WHOLE else 60))
RANKS: Final = (1, 2, 3, 4, 8) if WHOLE else (1, 3)
LAYOUTS: Final = ("experts", "padded", "tokens")
DTYPES: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {"input": "bfloat16"},
    "float16": {"input": "float16"},
    "float32": {"input": "float32"},
    "float32 to bfloat16": {"input": "float32", "wire": "bfloat16", "combine": "bfloat16"},
    "quantised by the group": {"wire": FP8, "scale_block": 32},
    "quantised by the caller": {"input": FP8, "scale_block": 16, "output": "float32"},
    "without scales": {"input": FP8},
    "a short last block": {"wire": FP8, "scale_block": 48},
    "a short last block of the caller": {"input": FP8, "scale_block": 24},
}


@pytest.mark.parametrize("ranks", RANKS)
def test_all_dtypes_and_layouts(drive: Drive, fabric: str, ranks: int) -> None:
    drive(
        *[
            Scenario(
                ranks=ranks,
                experts=8 if ranks < 8 else 24,
                top_k=1 + (number + len(layout)) % 5,
                align=(1, 8)[number % 2],
                layout=layout,
                fabric=fabric,
                numpy=number % 3 == 2,
                own_memory=number % 2 == 1,
                steps=4,
                **dtypes,
            )
            for number, dtypes in enumerate(DTYPES.values())
            for layout in LAYOUTS
        ]
    )


@pytest.mark.parametrize("routing", ["even", "skewed", "holes", "one rank", "repeated"])
def test_all_routings(drive: Drive, fabric: str, routing: Any) -> None:
    base = Scenario(ranks=3, experts=10, top_k=4, routing=routing, fabric=fabric, steps=5)
    drive(
        base,
        replace(base, copies=2, layout="tokens"),
        replace(base, experts=2, top_k=1, layout="padded"),  # a rank without experts
        replace(base, top_k=8, experts=256, layout="tokens"),
        replace(base, max_tokens=1, overlap=True),
    )


def test_steps_overlap(drive: Drive, fabric: str) -> None:
    base = Scenario(ranks=3, experts=9, top_k=3, fabric=fabric, steps=12, overlap=True)
    drive(base, replace(base, layout="tokens", pauses=True))


def test_refused_steps_fail_at_all_ranks_and_the_other_steps_are_whole(
    drive: Drive, fabric: str
) -> None:
    base = Scenario(ranks=3, experts=9, top_k=3, fabric=fabric, steps=12, refuser=2)
    drive(
        replace(base, refused_steps=(0, 5, 6, 11)),
        replace(base, refused_steps=(1, 2, 4, 7), overlap=True, pauses=True, layout="tokens"),
        replace(base, refused_steps=(2, 3, 8), overlap=True, refuser=0, layout="padded"),
        replace(base, ranks=1, refuser=0, refused_steps=(0, 1, 5), overlap=True),
    )


@pytest.mark.parametrize("ranks", [2, 8] if WHOLE else [2])
def test_many_rounds_of_ranks_that_pause(drive: Drive, fabric: str, ranks: int) -> None:
    drive(
        Scenario(
            ranks=ranks,
            experts=ranks * 4,
            top_k=4,
            max_tokens=8,
            fabric=fabric,
            copies=2,
            pauses=True,
            steps=ROUNDS,
        )
    )


@pytest.mark.skipif(not WHOLE, reason="make test SUITE=moe")
def test_shapes_at_random(drive: Drive, rng: random.Random) -> None:
    for _ in range(4):
        drive(*[_any_scenario(rng) for _ in range(12)])


def _any_scenario(rng: random.Random) -> Scenario:
    ranks = rng.randint(1, 8)
    experts = rng.choice((ranks, 8, 17, 64, 256))
    return Scenario(
        ranks=ranks,
        experts=experts,
        top_k=rng.randint(1, min(8, experts)),
        hidden=rng.choice((32, 96, 512)),
        max_tokens=rng.choice((1, 5, 40)),
        align=rng.choice((1, 4, 16)),
        layout=rng.choice(LAYOUTS),
        fabric=rng.choice(("local", "tcp")),
        copies=rng.randint(1, ranks),
        routing=rng.choice(("even", "skewed", "holes", "one rank", "repeated")),
        overlap=rng.random() < 0.3,
        pauses=rng.random() < 0.3,
        numpy=rng.random() < 0.3,
        own_memory=rng.random() < 0.3,
        steps=8,
        **rng.choice(list(DTYPES.values())),
    )
