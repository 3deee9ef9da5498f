"""Makes the checkpoint of a tiny Llama with seeded weights: `python tiny_llama.py FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512


def config_of(
    layers: int = 4, kv_heads: int = 2, head_dim: int = 32, vocabulary: int = VOCABULARY
) -> LlamaConfig:
    """Weights have a standard deviation of 0.2. With less the logits are nearly flat, and equal
    tokens prove little. The tokenizer always has VOCABULARY words."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=max(4, kv_heads),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
    )


def make(
    folder: Path,
    layers: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> None:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    config = config_of(layers, kv_heads, head_dim, vocabulary)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """One word for each token."""
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    chats = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w2", bos_token="w0", eos_token="w1"
    )
    chats.chat_template = "{% for said in messages %}w3 {{ said.content }} {% endfor %}w4"
    chats.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for option in ("--layers", "--kv-heads", "--head-dim", "--vocabulary", "--seed"):
        parser.add_argument(option, type=int, default=argparse.SUPPRESS)
    make(**vars(parser.parse_args()))
