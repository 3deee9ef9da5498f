"""A model with experts in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from kvxfer.errors import InvalidArgument
from kvxfer.reference.experts import DenseExperts, answer, route
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.shards import Shard, boxes_of
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import expert_weights, seeded_weights

from .tiny import TINY_EXPERTS

SEED = 3
PROMPT = list(b"experts")


def mixtral() -> Any:
    """Returns transformers' model with the weights of ours."""
    config = TINY_EXPERTS
    theirs: Any = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            sliding_window=None,
            num_local_experts=config.num_experts,
            num_experts_per_tok=config.experts_per_token,
        )
    )
    weights = dict(seeded_weights(config, SEED))
    for layer in range(config.num_layers):
        experts = [
            expert_weights(config, SEED, layer, expert) for expert in range(config.num_experts)
        ]
        prefix = f"model.layers.{layer}.mlp.experts."
        weights[prefix + "gate_up_proj"] = torch.stack([each.gate_up for each in experts])
        weights[prefix + "down_proj"] = torch.stack([each.down for each in experts])
    theirs.load_state_dict(weights)
    return theirs.eval()


def model() -> LlamaModel:
    return LlamaModel(
        TINY_EXPERTS,
        seeded_weights(TINY_EXPERTS, SEED),
        experts=DenseExperts(TINY_EXPERTS, SEED),
    )


def test_logits_and_greedy_tokens_are_those_of_transformers() -> None:
    theirs, cache = mixtral(), PagedKvCache(TINY_EXPERTS, 32, 4)
    tokens = torch.tensor(PROMPT)
    with torch.inference_mode():
        expected = theirs(tokens.unsqueeze(0)).logits[0, -1]
    ours = model().prefill(tokens, cache, torch.arange(32))
    assert torch.allclose(ours, expected, atol=1e-4, rtol=1e-4)

    generated = ModelRunner(model(), ByteTokenizer(), cache).generate(PROMPT, 24)
    with torch.inference_mode():
        whole = theirs.generate(
            tokens.unsqueeze(0), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
    assert generated == whole[0, len(PROMPT) :].tolist()


def test_each_expert_counts() -> None:
    """If tokens stayed right without an expert, comparing tokens would not test the experts."""
    whole = ModelRunner(model(), ByteTokenizer(), PagedKvCache(TINY_EXPERTS, 32, 4))
    expected = whole.generate(PROMPT, 24)
    changed = 0
    for layer in range(TINY_EXPERTS.num_layers):
        for expert in range(TINY_EXPERTS.num_experts):
            experts = DenseExperts(TINY_EXPERTS, SEED)
            experts._layers[layer][expert].down.zero_()
            without = LlamaModel(TINY_EXPERTS, seeded_weights(TINY_EXPERTS, SEED), experts=experts)
            runner = ModelRunner(without, ByteTokenizer(), PagedKvCache(TINY_EXPERTS, 32, 4))
            changed += runner.generate(PROMPT, 24) != expected
    assert changed > 0.8 * TINY_EXPERTS.num_layers * TINY_EXPERTS.num_experts


def test_a_sum_of_two_experts_has_the_same_bits_in_parts_and_in_any_order() -> None:
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(TINY_EXPERTS.hidden_size, generator=generator)
    first, second = (expert_weights(TINY_EXPERTS, SEED, 0, expert) for expert in (0, 5))
    _, shares = route(torch.randn(1, 8, generator=generator), 2)
    one, two = (first, shares[0, 0]), (second, shares[0, 1])
    assert torch.equal(answer(row, [one, two]), answer(row, [two, one]))
    assert torch.equal(answer(row, [one, two]), answer(row, [one]) + answer(row, [two]))
    assert not answer(row, []).any()


def test_the_shares_of_a_token_are_those_of_its_largest_logits() -> None:
    ids, shares = route(torch.tensor([[0.0, 3.0, 1.0, 3.5]]), 2)
    assert ids.tolist() == [[3, 1]]
    assert torch.allclose(shares, torch.tensor([[3.5, 3.0]]).softmax(-1))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"experts_per_token": 9}, "experts_per_token is 9"),
        ({"experts_per_token": 0}, "experts_per_token is 0"),
        ({"num_experts": 0}, "there are 0 experts"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        replace(TINY_EXPERTS, **changes)


def test_more_experts_for_a_token_than_can_be_added_exactly_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="not of 3"):
        DenseExperts(replace(TINY_EXPERTS, experts_per_token=3), SEED)


def test_a_model_with_experts_needs_them_and_is_not_cut() -> None:
    with pytest.raises(InvalidArgument, match="8 experts"):
        LlamaModel(TINY_EXPERTS, seeded_weights(TINY_EXPERTS, SEED))
    with pytest.raises(InvalidArgument, match="spread over ranks"):
        boxes_of(TINY_EXPERTS, Shard(0, 2))
