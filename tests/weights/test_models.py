"""The known models: their published sizes, and the plan of a trillion parameters."""

from __future__ import annotations

import math

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.weights.models import model_map
from kvxfer.weights.plan.schedule import Schedule, plan_weights


@pytest.fixture(scope="module")
def kimi() -> Schedule:
    return plan_weights(model_map("kimi-k2", 256, 128))


def size(model: str) -> int:
    held = model_map(model, 8, 4).train.parameters
    return sum(each.count * math.prod(each.shape) for each in held)


def test_published_sizes() -> None:
    assert size("llama-3-8b") == 8_030_261_248
    assert 1.02e12 < size("kimi-k2") < 1.04e12


def test_kimi_k2_is_balanced_from_256_to_128_ranks(kimi: Schedule) -> None:
    figures = kimi.figures
    for each in (figures.senders, figures.receivers, figures.sender_nics, figures.receiver_nics):
        assert each.balance <= 1.05
    # Experts go to one rank each, in bf16; the rest to each group of 8 ranks or to every rank.
    experts = 60 * 384 * 3 * 7168 * 2048 * 2
    assert experts < figures.nbytes < 1.35 * experts
    assert figures.parameters == 60 * 384 * 3 + 61 * 9 + 3 + 60 * 5 + 3
    assert (figures.padding_bytes, figures.unwanted) == (0, 0)


def test_no_write_of_kimi_k2_is_tiny_and_none_exceeds_a_slice(kimi: Schedule) -> None:
    assert kimi.figures.largest_write <= 64 << 20
    assert int(kimi.operations.nbytes.min()) >= 1 << 20


def test_an_expert_goes_from_its_shards_to_its_owner(kimi: Schedule) -> None:
    name = "model.layers.7.mlp.experts.3.down_proj.weight"
    found = {
        rank: (write.receiver, piece.offset, piece.shape, piece.source_offset, piece.target_offset)
        for rank in range(4)  # the first of 64 groups of training has experts 0 to 5
        for write in kimi.writes_of(rank)
        for piece in write.pieces
        if piece.parameter == name
    }
    assert found == {
        rank: (1, (1792 * rank, 0), (1792, 2048), (0, 0), (1792 * rank, 0)) for rank in range(4)
    }


def test_kv_heads_have_replicas_where_more_ranks_share_them() -> None:
    schedule = plan_weights(model_map("llama-3-8b", 4, 16, tensor=16))
    wanted = {
        write.receiver: piece.shape
        for write in schedule.writes_of(0)
        for piece in write.pieces
        if piece.parameter == "model.layers.0.self_attn.k_proj.weight"
    }
    assert wanted == dict.fromkeys(range(4), (128, 4096))  # two heads, each on two ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt-5", 8, 4), "'gpt-5' is not a known model; use kimi-k2 or llama-3-8b"),
        (("kimi-k2", 0, 4), "train is 0; use 1 or more"),
        (("kimi-k2", 8, 0), "infer is 0; use 1 or more"),
    ],
)
def test_unknown_models_and_wrong_sizes_are_refused(
    arguments: tuple[str, int, int], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        model_map(*arguments)
