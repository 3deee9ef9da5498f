"""The model against transformers' LlamaForCausalLM; and paging, which must not change results."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvxfer.reference.checkpoint import load_config, load_weights
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.weights import seeded_weights

from .tiny import TINY, shifted_planes

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "multi-query": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 24},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
}
PROMPT_LENGTHS = (1, 15, 16, 17, 150)


def save_checkpoint(folder: Path, **changes: Any) -> Any:
    """Saves a random LlamaForCausalLM, with random biases, to `folder`."""
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # With 0.02, the default, logits are so flat that greedy output means nothing.
        "initializer_range": 0.2,
    }
    config = transformers.LlamaConfig(**sizes | changes)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(tmp_path, **VARIANTS[variant])
    config = load_config(tmp_path)
    ours = LlamaModel(config, load_weights(tmp_path, config))
    rng = random.Random(7)
    cache = PagedKvCache(config, num_blocks=16, block_size=16)
    for length in PROMPT_LENGTHS:
        prompt = [rng.randrange(config.vocab_size) for _ in range(length)]
        blocks = torch.tensor(rng.sample(range(16), 12))
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0, -1]
            generated = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, length, dtype=torch.int64),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        logits = ours.prefill(torch.tensor(prompt), cache, blocks)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        tokens = [int(logits.argmax())]
        for step in range(23):
            logits = ours.decode(tokens[-1], length + step, cache, blocks)
            tokens.append(int(logits.argmax()))
        assert tokens == generated[0, length:].tolist()


def test_output_is_bit_equal_in_any_blocks_and_memory() -> None:
    model = LlamaModel(TINY, seeded_weights(TINY, seed=3))
    prompt = torch.tensor(list(b"which block a page lies in must not show in a single bit"))
    rng = random.Random(11)
    results = []
    for offset in (None, 0, 4):
        planes = None if offset is None else shifted_planes(TINY, 64, 4, offset)
        cache = PagedKvCache(TINY, num_blocks=64, block_size=4, planes=planes)
        for _ in range(3):
            blocks = torch.tensor(rng.sample(range(64), 16))
            logits = [model.prefill(prompt, cache, blocks)]
            logits.append(model.decode(int(logits[0].argmax()), len(prompt), cache, blocks))
            results.append(torch.stack(logits))
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_on_layer_is_called_once_for_each_layer_when_it_is_complete_in_the_cache() -> None:
    model = LlamaModel(TINY, seeded_weights(TINY, seed=3))
    prompt = torch.tensor(list(b"layer by layer"))
    blocks = torch.tensor([5, 0, 7, 2])
    complete = PagedKvCache(TINY, num_blocks=8, block_size=4)
    model.prefill(prompt, complete, blocks)

    cache = PagedKvCache(TINY, num_blocks=8, block_size=4)
    seen = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        for ours, final in zip(
            cache.read(layer, blocks, 14), complete.read(layer, blocks, 14), strict=True
        ):
            assert torch.equal(ours, final)

    model.prefill(prompt, cache, blocks, on_layer)
    assert seen == [0, 1, 2]


def test_an_error_in_on_layer_ends_the_prefill() -> None:
    model = LlamaModel(TINY, seeded_weights(TINY, seed=3))
    cache = PagedKvCache(TINY, num_blocks=8, block_size=4)
    seen = []

    def give_up(layer: int) -> None:
        seen.append(layer)
        raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        model.prefill(torch.tensor([1, 2, 3]), cache, torch.tensor([0]), give_up)
    assert seen == [0]


def test_only_blocks_of_the_sequence_are_written(tiny_runner: ModelRunner) -> None:
    everything = torch.arange(32)
    assert not any(plane.any() for plane in tiny_runner.cache.read(0, everything, 128))
    prompt = list(b"only these")
    first = tiny_runner.prefill(prompt, [3, 9, 4, 30])
    list(tiny_runner.decode(first, len(prompt), [3, 9, 4, 30], max_tokens=6))
    for layer in range(TINY.num_layers):
        for plane in tiny_runner.cache.read(layer, everything, 128):
            used = plane.view(32, -1).any(dim=1).nonzero().flatten().tolist()
            assert used == [3, 4, 9, 30]


def test_losing_one_block_of_one_layer_shows_in_the_tokens() -> None:
    """Otherwise comparing greedy tokens would not test the transfer."""
    model = LlamaModel(TINY, seeded_weights(TINY, seed=3))
    cache = PagedKvCache(TINY, num_blocks=40, block_size=4)
    rng = random.Random(5)
    prompt = bytes(rng.randrange(256) for _ in range(100))
    blocks = torch.arange(40)
    first = int(model.prefill(torch.tensor(list(prompt)), cache, blocks).argmax())

    def output() -> list[int]:
        tokens = [first]
        for step in range(47):
            tokens.append(int(model.decode(tokens[-1], len(prompt) + step, cache, blocks).argmax()))
        return tokens

    expected = output()
    assert len(set(expected)) > 24
    changed = 0
    for _ in range(20):
        layer, block = rng.randrange(TINY.num_layers), rng.randrange(25)
        slots = torch.arange(block * 4, block * 4 + 4)
        saved = cache.read(layer, torch.tensor([block]), 4)
        cache.write(layer, slots, torch.zeros_like(saved[0]), torch.zeros_like(saved[1]))
        changed += output() != expected
        cache.write(layer, slots, *saved)
    assert output() == expected
    assert changed >= 15
