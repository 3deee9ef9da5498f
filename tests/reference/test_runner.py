from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kvxfer.errors import InvalidArgument, PromptTooLong
from kvxfer.reference.config import DEMO_CONFIG
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner, load_model
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import seeded_weights

from .tiny import TINY, shifted_planes


def test_prefill_and_decode_steps_give_the_tokens_of_a_single_run(tiny_runner: ModelRunner) -> None:
    prompt = "the quick brown fox"
    expected = tiny_runner.generate(prompt, 10)
    assert len(expected) == 10
    blocks = [31, 2, 17, 5, 11, 8, 23]
    first = tiny_runner.prefill(list(prompt.encode()), blocks)
    rest = list(tiny_runner.decode(first, len(prompt), blocks, max_tokens=10))
    assert [first, *rest] == expected


def test_one_output_token_needs_no_decode_step(tiny_runner: ModelRunner) -> None:
    assert len(tiny_runner.generate("x", 1)) == 1
    assert list(tiny_runner.decode(0, 1, [0], max_tokens=1)) == []


def test_an_end_token_ends_the_run_unless_ignored() -> None:
    weights = seeded_weights(TINY, seed=1)
    cache = PagedKvCache(TINY, 32, 4)
    output = ModelRunner(LlamaModel(TINY, weights), ByteTokenizer(), cache).generate("abc", 12)
    for position in (0, 5):
        end = output[position]
        config = dataclasses.replace(TINY, eos_token_ids=(end,))
        runner = ModelRunner(LlamaModel(config, weights), ByteTokenizer(), cache)
        assert runner.generate("abc", 12) == output[: output.index(end) + 1]
        assert runner.generate("abc", 12, ignore_eos=True) == output


def test_blocks_cover_all_stored_positions_and_no_more(tiny_runner: ModelRunner) -> None:
    # Blocks of 4 tokens; the last output token is never stored.
    assert tiny_runner.blocks_for(4, 1) == 1
    assert tiny_runner.blocks_for(4, 2) == 2
    assert tiny_runner.blocks_for(100, 29) == 32


def test_a_prompt_longer_than_the_cache_or_the_context_is_refused(
    tiny_runner: ModelRunner,
) -> None:
    with pytest.raises(PromptTooLong, match=r"129 tokens .* KV cache of 32 blocks of 4 tokens"):
        tiny_runner.generate([1] * 129, 1)
    with pytest.raises(PromptTooLong, match="does not fit the KV cache"):
        tiny_runner.generate([1] * 128, 2)
    with pytest.raises(PromptTooLong, match=r"300 tokens .* context of tiny, 256 tokens"):
        tiny_runner.generate([1] * 300, 1)
    assert len(tiny_runner.generate([1] * 128, 1)) == 1


def test_empty_and_foreign_prompts_are_refused(tiny_runner: ModelRunner) -> None:
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        tiny_runner.encode("")
    with pytest.raises(InvalidArgument, match=r"token 256 .* vocabulary of 256 of tiny"):
        tiny_runner.encode([1, 256])
    with pytest.raises(InvalidArgument, match="token -1"):
        tiny_runner.encode([-1])


def test_a_cache_over_foreign_memory_gives_the_same_tokens(tiny_runner: ModelRunner) -> None:
    planes = shifted_planes(TINY, 32, 4)
    cache = PagedKvCache(TINY, 32, 4, planes)
    runner = ModelRunner(tiny_runner.model, ByteTokenizer(), cache)
    assert runner.generate("shared", 8) == tiny_runner.generate("shared", 8)
    assert all(plane.any() for layer in planes for plane in layer)


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="0 blocks of 4 tokens holds nothing"):
        PagedKvCache(TINY, 0, 4)


def test_without_a_folder_the_model_is_always_the_same_demo_model() -> None:
    (first, tokenizer), (second, _) = load_model(None), load_model(None)
    assert first.config == DEMO_CONFIG
    assert isinstance(tokenizer, ByteTokenizer)
    prompt = torch.tensor(list(b"same weights"))
    logits = [
        m.prefill(prompt, PagedKvCache(DEMO_CONFIG, 1, 16), torch.tensor([0]))
        for m in (first, second)
    ]
    assert torch.equal(*logits)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"has no config\.json"):
        load_model(tmp_path)
