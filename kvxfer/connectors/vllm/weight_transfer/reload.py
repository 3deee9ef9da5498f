"""Loads staged weights into a live vLLM model, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from kvxfer.errors import WeightsMismatch
from kvxfer.weights.holdings import Holding
from kvxfer.weights.transfer.arena import Arena
from kvxfer.weights.window import window_over


def check_reloadable(model: torch.nn.Module) -> None:
    """Raises WeightsMismatch for a model that would keep using earlier weights: vLLM 0.32 prepares
    the weights of some kernels (all experts on CPUs) once, and not again after a reload."""
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            experts = type(method.moe_kernel.fused_experts)
            if experts.process_weights_after_loading is not (
                FusedMoEExperts.process_weights_after_loading
            ):
                raise WeightsMismatch(
                    f"{name} computes with {experts.__name__}, whose weights vLLM does not renew "
                    "in a live instance; use another --moe-backend, or restart vLLM instead"
                )


Shapes = Mapping[str, Sequence[int]]


def windows_over(arena: Arena, memory: Any, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters that are staged in an arena's memory. `shapes` are the trainer's; only
    these distinguish a scalar from a vector of one element."""
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
    """Loads weights into a model, which serves with them from now on. Parameters keep their
    addresses, which captured graphs use. If it raises, some layers have the new weights and others
    the old ones."""
    loading: Any = model
    with torch.no_grad(), device:
        initialize_layerwise_reload(model)
        loading.load_weights(weights)
        finalize_layerwise_reload(model, model_config)
        for layer, method in _tied(model):
            # On CPUs vLLM computes logits with a packed copy. The copy of an lm_head that shares
            # the embedding's weights is still the old one, as nothing was loaded there.
            method.process_weights_after_loading(layer)


def _tied(model: torch.nn.Module) -> list[tuple[torch.nn.Module, UnquantizedEmbeddingMethod]]:
    """Returns the embeddings and output heads that share their weights with another layer."""
    found: dict[int, list[tuple[torch.nn.Module, UnquantizedEmbeddingMethod]]] = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            found.setdefault(id(layer.weight), []).append((layer, method))
    return [each for sharing in found.values() if len(sharing) > 1 for each in sharing]
