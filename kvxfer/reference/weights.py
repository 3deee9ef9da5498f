"""The weights of a model by their Hugging Face names: their shapes, and seeded random ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvxfer.reference.config import LlamaConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
_PROCESSOR: Final = torch.device("cpu")


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def weight_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, shape) of every tensor of the model; linear layers are [outputs, inputs].

    A model with experts has their routers here, but not the experts: `expert_weights`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    yield EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        linears = [
            ("self_attn.q_proj", q_size, hidden, config.attention_bias),
            ("self_attn.k_proj", kv_size, hidden, config.attention_bias),
            ("self_attn.v_proj", kv_size, hidden, config.attention_bias),
            ("self_attn.o_proj", hidden, q_size, config.attention_bias),
        ]
        if config.num_experts:
            linears.append(("mlp.gate", config.num_experts, hidden, False))
        else:
            linears += [
                ("mlp.gate_proj", inner, hidden, config.mlp_bias),
                ("mlp.up_proj", inner, hidden, config.mlp_bias),
                ("mlp.down_proj", hidden, inner, config.mlp_bias),
            ]
        for name, outputs, inputs, bias in linears:
            yield f"{prefix}{name}.weight", (outputs, inputs)
            if bias:
                yield f"{prefix}{name}.bias", (outputs,)
    yield FINAL_NORM, (hidden,)
    if not config.tie_embeddings:
        yield LM_HEAD, (config.vocab_size, hidden)


# Standard deviation relative to one that keeps the variance of a projection's input. Large Q and K
# make attention pick out few positions instead of averaging all of them, and a large output
# projection lets that count: the next token depends on which keys and values are where, so a
# single lost block changes greedy output (with 1.0 everywhere it hardly ever does).
_GAINS = {"q_proj": 3.0, "k_proj": 3.0, "o_proj": 2.0}
# Likewise: a lost expert changes the output.
_EXPERT_GAIN: Final = 3.0


class ExpertWeights(NamedTuple):
    """The weights of one feed-forward network."""

    gate_up: Tensor
    """[2 * intermediate_size, hidden_size]."""
    down: Tensor
    """[hidden_size, intermediate_size]."""


def expert_weights(config: LlamaConfig, seed: int, layer: int, expert: int) -> ExpertWeights:
    """Returns random weights of one expert, from the arguments only: a rank draws its own."""
    number = layer * config.num_experts + expert
    generator = torch.Generator().manual_seed(seed << 32 | number)
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = torch.randn((2 * inner, hidden), generator=generator) * hidden**-0.5
    down = torch.randn((hidden, inner), generator=generator) * (_EXPERT_GAIN * inner**-0.5)
    return ExpertWeights(gate_up, down)


def seeded_weights(
    config: LlamaConfig,
    seed: int,
    device: torch.device = _PROCESSOR,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Returns random weights that depend on `config`, `seed` and the kind of device only."""
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(config):
        if len(shape) == 1:
            fill = torch.zeros if name.endswith(".bias") else torch.ones
            weights[name] = fill(shape, device=device, dtype=dtype)
            continue
        gain = _GAINS.get(name.split(".")[-2], 1.0)
        std = 1.0 if name == EMBEDDING else gain * shape[1] ** -0.5
        drawn = torch.randn(shape, generator=generator, device=device)
        weights[name] = (drawn * std).to(dtype)
    return weights
