"""Makes the checkpoint of a tiny model with seeded weights: `python tiny_models.py KIND FOLDER`.

`sliding` has layers with a sliding window and layers without (Gemma 3), `mla` one latent vector per
token (DeepSeek V2).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_llama import VOCABULARY, save_tokenizer
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
)

WINDOW = 200
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "vocab_size": VOCABULARY}


def sliding() -> PreTrainedModel:
    """Two layers of three have a window."""
    config = Gemma3TextConfig(
        **_TOKENS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        initializer_range=0.2,
    )
    return Gemma3ForCausalLM(config)


def mla() -> PreTrainedModel:
    config = DeepseekV2Config(
        **_TOKENS,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.2,
    )
    return DeepseekV2ForCausalLM(config)


if __name__ == "__main__":
    torch.manual_seed(0)
    kind, folder = {"sliding": sliding, "mla": mla}[sys.argv[1]], Path(sys.argv[2])
    kind().to(torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
