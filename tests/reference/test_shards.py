"""The boxes of ranks: together they are the model, and each is what its rank computes with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvxfer.errors import InvalidArgument
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.shards import Shard, boxes_of, cut, holdings_of, local_config
from kvxfer.reference.weights import EMBEDDING, LM_HEAD, seeded_weights, weight_shapes
from kvxfer.weights.holdings import map_of
from kvxfer.weights.plan.schedule import plan_weights

from .tiny import TINY

BIASED = replace(TINY, attention_bias=True, mlp_bias=True)
UNEVEN = replace(TINY, vocab_size=250)  # 63 rows for each of 4 ranks, 61 for the last one
FEW = replace(TINY, vocab_size=5)  # 2, 2, 1 and 0 rows
TIED = replace(TINY, tie_embeddings=True)


@pytest.mark.parametrize("config", [TINY, BIASED, UNEVEN, FEW, TIED])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_boxes_cover_every_element_and_split_ones_once(config: LlamaConfig, ranks: int) -> None:
    weights = {name: torch.zeros(shape) for name, shape in weight_shapes(config)}
    for rank in range(ranks):
        for box in cut(config, weights, Shard(rank, ranks)).values():
            box += 1
    replicated = {"input_layernorm", "post_attention_layernorm", "norm"}
    for name, counts in weights.items():
        kind = name.split(".")[-2]
        times = 1
        if kind in replicated or (kind in ("o_proj", "down_proj") and name.endswith("bias")):
            times = ranks
        elif kind in ("k_proj", "v_proj"):
            times = max(ranks // config.num_kv_heads, 1)
        assert (counts == times).all(), name


def test_a_rank_has_the_kv_head_of_its_query_heads() -> None:
    for rank in range(4):
        boxes = boxes_of(TINY, Shard(rank, 4))
        assert boxes["model.layers.0.self_attn.q_proj.weight"].offset == (16 * rank, 0)
        assert boxes["model.layers.0.self_attn.k_proj.weight"].offset == (16 * (rank // 2), 0)
    assert local_config(TINY, 4).num_kv_heads == 1


def test_holdings_are_boxes_without_padding_and_not_empty() -> None:
    of_rank = [
        {each.name: each for each in holdings_of(FEW, Shard(rank, 4)).parameters}
        for rank in range(4)
    ]
    assert [each[EMBEDDING].shape[0] for each in of_rank[:3]] == [2, 2, 1]
    assert EMBEDDING not in of_rank[3]
    assert LM_HEAD not in of_rank[3]
    assert {each.whole[0] for ranks in of_rank[:3] for each in (ranks[EMBEDDING],)} == {5}
    assert holdings_of(TIED, Shard()).tied == {LM_HEAD: EMBEDDING}


@pytest.mark.parametrize("config", [BIASED, FEW, TIED])
def test_the_planner_takes_the_holdings(config: LlamaConfig) -> None:
    train = [holdings_of(config, Shard())]
    infer = [holdings_of(config, Shard(rank, 4), "float32") for rank in range(4)]
    plan = plan_weights(map_of(train, infer))
    wanted = sum(each.nbytes for rank in infer for each in rank.parameters)
    assert plan.figures.nbytes == wanted


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (TINY, 3, "heads 4 cannot be split over 3 ranks"),
        (replace(TINY, intermediate_size=97), 2, "inner dimension 97"),
        (replace(TINY, num_heads=12, num_kv_heads=6, intermediate_size=96), 4, "6 KV heads"),
        (TINY, 0, "0 ranks compute nothing"),
    ],
)
def test_the_error_names_what_cannot_be_split(config: LlamaConfig, ranks: int, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        boxes_of(config, Shard(0, ranks))


def test_cut_boxes_are_views() -> None:
    weights = seeded_weights(TINY, 1)
    box = cut(TINY, weights, Shard(1, 2))[EMBEDDING]
    assert box.data_ptr() == weights[EMBEDDING][128:].data_ptr()
