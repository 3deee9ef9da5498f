"""The Llama architecture over a paged KV cache: prefill of a prompt, and single decode steps.

One sequence per call, all in the type and on the device of the weights. With the same weights,
thread count and machine, the same calls give the same bits: nothing depends on which blocks a
sequence got, on where the cache lies, or on what else runs. That is what makes "decode after a
transfer gives the tokens of a single process" a comparison of integers without tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.rope import inverse_frequencies, rotate, rotation
from kvxfer.reference.weights import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    q: _Linear
    kv: _Linear
    output: _Linear
    post_attention_norm: Tensor
    gate_up: _Linear
    down: _Linear


class LlamaModel:
    """A model with its weights. Stateless between calls, so any thread may call it."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor]) -> None:
        """`weights` has the names and shapes of `weight_shapes(config)`."""
        self.config = config
        self._embedding = weights[EMBEDDING]
        self._final_norm = weights[FINAL_NORM]
        self._lm_head = weights[EMBEDDING if config.tie_embeddings else LM_HEAD]
        self._frequencies = inverse_frequencies(config).to(self.device)
        self._layers = [_layer(weights, layer_prefix(i)) for i in range(config.num_layers)]

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Tensor,
        cache: PagedKvCache,
        blocks: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Computes a whole prompt: its KV goes to the cache, the last token's logits come back.

        `on_layer(layer)` is called as soon as the keys and values of that layer are complete in
        the cache, or on a GPU will be when its stream gets there, before its attention runs: from
        then on they can be sent while the rest is computed. An exception it raises ends the
        prefill.

        Args:
            tokens: int64 [prompt length].
            blocks: int64 block table that covers the prompt.

        Returns:
            [vocab_size].
        """
        config, count = self.config, len(tokens)
        slots = cache.slots(blocks, 0, count)
        cos, sin = rotation(self._frequencies, torch.arange(count, device=self.device))
        x = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._norm(x, layer.input_norm)
            keys, values = self._keys_values(layer, normed, cos, sin)
            cache.write(index, slots, keys, values)
            if on_layer is not None:
                on_layer(index)
            if index == config.num_layers - 1:
                # Beyond the last layer only the last token matters.
                x, normed, cos, sin = x[-1:], normed[-1:], cos[-1:], sin[-1:]
            queries = self._queries(layer, normed, cos, sin)
            attended = cache.attend(index, queries, keys, values, blocks, count)
            x = self._feed_forward(layer, x + layer.output(attended.flatten(1)))
        return self._logits(x)

    @torch.inference_mode()
    def decode(self, token: int, position: int, cache: PagedKvCache, blocks: Tensor) -> Tensor:
        """One step: stores the KV of `token` at `position` and attends to all positions up to it.

        Returns:
            [vocab_size], the logits of the token after it.
        """
        slots = cache.slots(blocks, position, position + 1)
        here = torch.tensor([position], device=self.device)
        cos, sin = rotation(self._frequencies, here)
        x = F.embedding(torch.tensor([token], device=self.device), self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._norm(x, layer.input_norm)
            keys, values = self._keys_values(layer, normed, cos, sin)
            cache.write(index, slots, keys, values)
            queries = self._queries(layer, normed, cos, sin)
            attended = cache.attend(index, queries, keys, values, blocks, position + 1)
            x = self._feed_forward(layer, x + layer.output(attended.flatten(1)))
        return self._logits(x)

    def _queries(self, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self._heads(layer.q(normed)), cos, sin)

    def _keys_values(
        self, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._heads(layer.kv(normed)).chunk(2, dim=1)
        return rotate(keys, cos, sin), values

    def _heads(self, x: Tensor) -> Tensor:
        """[tokens, heads * head_size] → [tokens, heads, head_size]."""
        return x.view(len(x), -1, self.config.head_size)

    def _feed_forward(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.post_attention_norm)).chunk(2, dim=-1)
        return x + layer.down(F.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._norm(x, self._final_norm), self._lm_head).squeeze(0)


def _layer(weights: Mapping[str, Tensor], prefix: str) -> _Layer:
    def linear(*names: str) -> _Linear:
        weight = torch.cat([weights[f"{prefix}{name}.weight"] for name in names])
        if f"{prefix}{names[0]}.bias" not in weights:
            return _Linear(weight, None)
        return _Linear(weight, torch.cat([weights[f"{prefix}{name}.bias"] for name in names]))

    return _Layer(
        input_norm=weights[prefix + "input_layernorm.weight"],
        q=linear("self_attn.q_proj"),
        kv=linear("self_attn.k_proj", "self_attn.v_proj"),
        output=linear("self_attn.o_proj"),
        post_attention_norm=weights[prefix + "post_attention_layernorm.weight"],
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
