"""Makes the checkpoint of a tiny model with seeded weights: `python tiny_models.py KIND FOLDER
[SEED]`.

Kinds:

- `sliding`: layers with a sliding window and layers without (Gemma 3)
- `large`: the same with heads of two sizes, so blocks have different numbers of tokens (Gemma 4)
- `pools`: the same layers, which SGLang keeps in separate pools (Mellum)
- `mla`: one latent vector per token (DeepSeek V2)
- `uneven`: layers with different numbers of KV heads (Nemotron NAS); its configuration is code in
  the checkpoint
- `mamba`: Mamba 2 beside attention in each layer (Falcon H1)
- `experts`: four experts in each layer (Qwen3 MoE)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_llama import VOCABULARY, save_byte_tokenizer, save_tokenizer
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WINDOW = 200
_COMMON = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
_WINDOWS = {
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


def sliding() -> PreTrainedModel:
    """Makes a model in which two layers of three have a window."""
    config = Gemma3TextConfig(
        **_COMMON,
        **_WINDOWS,
        query_pre_attn_scalar=32,
    )
    return Gemma3ForCausalLM(config)


def large() -> PreTrainedModel:
    """Makes a model in which vLLM gives layers with a window blocks of twice as many tokens as
    those without."""
    config = Gemma4TextConfig(
        **_COMMON,
        **_WINDOWS,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
        tie_word_embeddings=False,
    )
    return Gemma4ForCausalLM(config)


def pools() -> PreTrainedModel:
    """Makes a model with the layers of `sliding`. No layer has experts."""
    config = MellumConfig(
        **_COMMON,
        **_WINDOWS,
        mlp_layer_types=["dense"] * 6,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    return MellumForCausalLM(config)


def mla() -> PreTrainedModel:
    config = DeepseekV2Config(
        **_COMMON,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )
    return DeepseekV2ForCausalLM(config)


def mamba() -> PreTrainedModel:
    config = FalconH1Config(
        **_COMMON,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=32,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=32,
        mamba_d_conv=4,
        tie_word_embeddings=False,
    )
    return FalconH1ForCausalLM(config)


def experts() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **_COMMON,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config)


KV_HEADS = (4, 2, 2, 1)
_UNEVEN_CONFIG = """
from transformers import LlamaConfig


class Block(dict):
    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class UnevenConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **more):
        super().__init__(**more)
        self.block_configs = [
            Block({name: Block(part) for name, part in block.items()}) for block in block_configs
        ]
"""


def save_uneven(folder: Path) -> None:
    """Writes a Llama with 4 KV heads. Each layer has only the first few of them."""
    config = LlamaConfig(
        **_COMMON,
        num_hidden_layers=len(KV_HEADS),
        head_dim=32,
        tie_word_embeddings=False,
    )
    weights = LlamaForCausalLM(config).to(torch.float32).state_dict()
    for layer, heads in enumerate(KV_HEADS):
        for name in ("k_proj", "v_proj"):
            key = f"model.layers.{layer}.self_attn.{name}.weight"
            weights[key] = weights[key][: heads * 32].clone()
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    ffn = {"no_op": False, "intermediate_size": 256}
    blocks = [
        {"attention": {"no_op": False, "n_heads_in_group": 4 // heads}, "ffn": ffn}
        for heads in KV_HEADS
    ]
    said = config.to_dict() | {
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_uneven.UnevenConfig"},
        "block_configs": blocks,
        "model_type": "nemotron-nas",
    }
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "configuration_uneven.py").write_text(_UNEVEN_CONFIG)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--tokenizer", choices=("words", "bytes"), default="words")
    options = parser.parse_args()
    kind, folder = options.kind, options.folder
    torch.manual_seed(options.seed)
    if kind == "uneven":
        save_uneven(folder)
    else:
        kinds = {"sliding": sliding, "large": large, "pools": pools, "mla": mla, "mamba": mamba}
        kinds["experts"] = experts
        made = kinds[kind]()
        made.to(torch.float32).save_pretrained(folder)
    (save_tokenizer if options.tokenizer == "words" else save_byte_tokenizer)(folder)
