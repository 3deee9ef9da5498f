"""A layer of experts in torch, spread over processes, computes what the dense layer does."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from kvxfer.errors import InvalidArgument
from kvxfer.moe import MoeShape, Placement
from kvxfer.moe.module import GroupedExperts
from tests.moe.module_rank import Layer, run

RANKS = 3


def run_ranks(layer: Layer) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.moe.module_rank"])
    ranks: list[Any] = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(layer, rank, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        addresses = [driver.recv() for _, driver in ranks]
        for _, driver in ranks:
            driver.send(addresses)
        assert [driver.recv() for _, driver in ranks] == [""] * RANKS
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("dtypes", "tolerance"),
    [
        ({"input": "float32"}, 1e-5),
        ({"input": "bfloat16"}, 0.03),
        ({"input": "float32", "wire": "float8_e4m3fn", "scale_block": 32}, 0.15),
        ({"input": "float32", "wire": "float8_e4m3fn", "scale_block": 24}, 0.15),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_spread_layer_equals_the_dense_one(
    dtypes: dict[str, Any], tolerance: float, overlap: bool
) -> None:
    shape = MoeShape(experts=8, hidden=64, top_k=3, max_tokens=20, **dtypes)
    run_ranks(Layer(shape, Placement.even(8, RANKS), tolerance, overlap))


def test_weights_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"\[2, 32, 8\]"):
        GroupedExperts(torch.zeros(2, 16, 8), torch.zeros(2, 8, 16))
