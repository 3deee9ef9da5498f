"""Rotary position embedding, with the frequency scalings of the Llama family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvxfer.reference.config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Returns the radians per position of each pair of dimensions, float32 [head_size / 2]."""
    exponent = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scales frequencies as Llama 3.1: stretches long wavelengths by `factor`, keeps short ones,
    and blends those between. Source: `apply_scaling` in Meta's llama-models
    (models/llama3/model.py)."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_position / scaling.low_freq_factor
    stretched = frequencies / scaling.factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * stretched + smooth * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, stretched, frequencies)
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blended, scaled)


def rotation(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine, each float32 [tokens, 1, head_size], of int64 [tokens] positions."""
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` [tokens, heads, head_size]; dimension i is paired with i + head_size / 2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
