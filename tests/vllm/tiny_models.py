"""Makes checkpoints with other KV caches than tiny_llama's: `python tiny_models.py KIND FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_llama import VOCABULARY, save
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
)

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}


def gemma() -> PreTrainedModel:
    """Layers with a sliding window of 512 tokens, and every sixth with the whole prompt."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=512,
        )
    )


def mla() -> PreTrainedModel:
    """One latent vector of 512 + 64 per token, the only size that vLLM's CPU kernel has."""
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **COMMON,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=2,
            n_routed_experts=4,
            moe_intermediate_size=64,
        )
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    save({"gemma": gemma, "mla": mla}[sys.argv[1]](), Path(sys.argv[2]))
