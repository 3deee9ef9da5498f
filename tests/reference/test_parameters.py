"""Weights are replaced in place, all or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvxfer.errors import InvalidArgument
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.parameters import FeedForward, Parameters
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.shards import Shard, cut
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import seeded_weights

from .tiny import TINY

BIASED = replace(TINY, attention_bias=True, mlp_bias=True)
PROMPT = "weights are replaced between two steps"


def tokens_of(model: LlamaModel) -> list[int]:
    return ModelRunner(model, ByteTokenizer(), PagedKvCache(model.config, 32, 4)).generate(
        PROMPT, 24
    )


def addresses(parameters: Parameters) -> list[int]:
    found = [parameters.embedding, parameters.lm_head, parameters.final_norm]
    for layer in parameters.layers:
        found += [layer.q.weight, layer.kv.weight, layer.output.weight]
        assert isinstance(layer.mlp, FeedForward)
        found += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
        found += [layer.input_norm, layer.post_attention_norm]
    return [each.data_ptr() for each in found]


def test_a_model_with_applied_weights_equals_one_loaded_with_them() -> None:
    before, after = seeded_weights(TINY, 1), seeded_weights(TINY, 2)
    model, fresh = LlamaModel(TINY, before), LlamaModel(TINY, after)
    assert tokens_of(model) != tokens_of(fresh)
    there = addresses(model._parameters)
    model.apply(after, version=7)
    assert model.weights_version == 7
    assert addresses(model._parameters) == there
    assert tokens_of(model) == tokens_of(fresh)
    prompt, blocks = torch.tensor(list(PROMPT.encode())), torch.arange(32)
    ours, theirs = (
        each.prefill(prompt, PagedKvCache(TINY, 32, 4), blocks) for each in (model, fresh)
    )
    assert torch.equal(ours, theirs)


def test_the_model_does_not_change_what_it_was_loaded_from() -> None:
    before = seeded_weights(TINY, 1)
    model = LlamaModel(TINY, before)
    model.apply(seeded_weights(TINY, 2), version=1)
    assert all(torch.equal(before[name], each) for name, each in seeded_weights(TINY, 1).items())


def test_weights_may_have_other_types() -> None:
    after = {name: each.bfloat16() for name, each in seeded_weights(TINY, 2).items()}
    model = LlamaModel(TINY, seeded_weights(TINY, 1))
    model.apply(after, version=1)
    fresh = LlamaModel(TINY, {name: each.float() for name, each in after.items()})
    assert model.dtype is torch.float32
    assert tokens_of(model) == tokens_of(fresh)


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)])
def test_a_missing_or_misshapen_box_changes_nothing(shard: Shard) -> None:
    here = Parameters(BIASED, shard, torch.float32, torch.device("cpu"))
    before = cut(BIASED, seeded_weights(BIASED, 1), shard)
    here.load(before)
    after = cut(BIASED, seeded_weights(BIASED, 2), shard)
    name = "model.layers.2.mlp.up_proj.weight"  # not the first parameter
    with pytest.raises(InvalidArgument, match=f"no {name}"):
        here.load({each: box for each, box in after.items() if each != name})
    with pytest.raises(InvalidArgument, match=rf"{name} has the shape \[1, 2\]"):
        here.load({**after, name: torch.zeros(1, 2)})
    for each, view in here._views.items():
        assert torch.equal(view, before[each])
