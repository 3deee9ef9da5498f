"""The weights of a model, or of one rank of it, in the memory that it computes with.

A checkpoint's parameters are views of that memory: keys and values are one matrix, and so are the
two inputs of the feed-forward network. New weights are copied into the views, in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvxfer.errors import InvalidArgument
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.shards import Box, Shard, boxes_of, vocabulary_rows
from kvxfer.reference.weights import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class FeedForward:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Router:
    """The router of a layer's experts. The experts' own weights are elsewhere."""

    gate: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    q: Linear
    kv: Linear
    output: Linear
    post_attention_norm: Tensor
    mlp: FeedForward | Router


class Parameters:
    """Memory for the boxes of one rank. One thread at a time may use or load it."""

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the memory, uninitialised but for the vocabulary's padding, which is zero."""
        self._name = config.name
        self._boxes = boxes_of(config, shard)
        self._dtype, self._device = dtype, device
        self._views: dict[str, Tensor] = {}
        rows = vocabulary_rows(config, shard.ranks)
        self.embedding = self._vocabulary(EMBEDDING, rows)
        self.lm_head = self.embedding
        if not config.tie_embeddings:
            self.lm_head = self._vocabulary(LM_HEAD, rows)
        self.final_norm = self._fused([FINAL_NORM])
        self.layers = [self._layer(layer_prefix(index)) for index in range(config.num_layers)]

    def load(self, boxes: Mapping[str, Tensor], whole: bool = True) -> None:
        """Copies in the boxes of all parameters, or unless `whole` of some, from any type and
        device.

        Raises InvalidArgument if one is missing or of another shape; nothing is copied then.
        """
        for name, view in self._views.items():
            if name not in boxes:
                if not whole:
                    continue
                raise InvalidArgument(f"{self._name}: the weights have no {name}; give all of them")
            if boxes[name].shape != view.shape:
                raise InvalidArgument(
                    f"{self._name}: {name} has the shape {list(boxes[name].shape)}; this rank "
                    f"needs {list(view.shape)}"
                )
        for name, view in self._views.items():
            if name in boxes:
                view.copy_(boxes[name])

    def _vocabulary(self, name: str, rows: int) -> Tensor:
        box = self._boxes[name]
        memory = self._empty((rows, box.whole[1]))
        memory[box.length :].zero_()
        if box.length:
            self._views[name] = memory[: box.length]
        return memory

    def _fused(self, names: Sequence[str]) -> Tensor:
        boxes: list[Box] = [self._boxes[name] for name in names]
        memory = self._empty((sum(box.shape[0] for box in boxes), *boxes[0].shape[1:]))
        at = 0
        for name, box in zip(names, boxes, strict=True):
            self._views[name] = memory[at : at + box.shape[0]]
            at += box.shape[0]
        return memory

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _linear(self, prefix: str, *names: str) -> Linear:
        weight = self._fused([f"{prefix}{name}.weight" for name in names])
        if f"{prefix}{names[0]}.bias" not in self._boxes:
            return Linear(weight, None)
        return Linear(weight, self._fused([f"{prefix}{name}.bias" for name in names]))

    def _layer(self, prefix: str) -> Layer:
        return Layer(
            input_norm=self._fused([prefix + "input_layernorm.weight"]),
            q=self._linear(prefix, "self_attn.q_proj"),
            kv=self._linear(prefix, "self_attn.k_proj", "self_attn.v_proj"),
            output=self._linear(prefix, "self_attn.o_proj"),
            post_attention_norm=self._fused([prefix + "post_attention_layernorm.weight"]),
            mlp=self._mlp(prefix),
        )

    def _mlp(self, prefix: str) -> FeedForward | Router:
        if f"{prefix}mlp.gate.weight" in self._boxes:
            return Router(self._linear(prefix, "mlp.gate"))
        return FeedForward(
            gate_up=self._linear(prefix, "mlp.gate_proj", "mlp.up_proj"),
            down=self._linear(prefix, "mlp.down_proj"),
        )
