"""Loads staged weights into a live vLLM model, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from kvxfer.weights.holdings import Holding
from kvxfer.weights.transfer.arena import Arena
from kvxfer.weights.window import window_over

Shapes = Mapping[str, Sequence[int]]


def windows_over(arena: Arena, memory: Any, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that are staged in an arena's memory. `shapes` are the trainer's; only there a
    scalar differs from a vector of one element."""
    staged = torch.frombuffer(memory, dtype=torch.uint8)
    for name, (holding, offset, nbytes) in arena.places.items():
        yield name, window_over(holding, _box(staged, holding, offset, nbytes), shapes[name])


def _box(staged: torch.Tensor, holding: Holding, offset: int, nbytes: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, holding.dtype)
    return staged[offset : offset + nbytes].view(dtype).view(holding.shape)


def load_in_place(
    model: torch.nn.Module,
    model_config: Any,
    device: torch.device,
    weights: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """The model serves with these weights from now on. Parameters keep their addresses, which
    captured graphs know. Where it raises, some layers have the new weights and others the old ones.
    """
    loading: Any = model
    with torch.no_grad(), device:
        initialize_layerwise_reload(model)
        loading.load_weights(weights)
        finalize_layerwise_reload(model, model_config)
