"""Makes the checkpoint of a tiny Llama with seeded weights: `python tiny_llama.py FOLDER`.

Its tokenizer knows words w0 to w511. With `--tokenizer bytes` it knows any text, byte by byte, and
its template knows tools and reasoning, for grammars and parsers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for document in documents or [] %}{{ document | tojson }}
{% endfor %}
{%- for said in messages %}<|im_start|>{{ said.role }}
{% if said.content is string %}{{ said.content }}{% else %}
{%- for part in said.content or [] %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in said.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}
{%- if not (continue_final_message and loop.last) %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def config_of(
    layers: int = 4, kv_heads: int = 2, head_dim: int = 32, vocabulary: int = VOCABULARY
) -> LlamaConfig:
    """Returns the configuration. Weights have a standard deviation of 0.2: with less the logits are
    nearly flat, and equal tokens prove little. The tokenizer always has VOCABULARY words."""
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
    tokenizer: str = "words",
) -> None:
    """Writes the checkpoint. The same seed gives the same weights."""
    torch.manual_seed(seed)
    config = config_of(layers, kv_heads, head_dim, vocabulary)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    (save_tokenizer if tokenizer == "words" else save_byte_tokenizer)(folder)


def save_byte_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with a token for each byte, and for each mark of tools, reasoning and
    turns."""
    names = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *_MARKS]
    names += [f"w{index}" for index in range(len(names), VOCABULARY)]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS[:4]])
    chats = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    chats.chat_template = _CHAT_TEMPLATE
    chats.save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one word for each token."""
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
    parser.add_argument("--tokenizer", choices=("words", "bytes"), default="words")
    make(**vars(parser.parse_args()))
