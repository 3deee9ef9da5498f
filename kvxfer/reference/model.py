"""The Llama architecture over a paged KV cache: prefill of a prompt, and single decode steps.

One sequence per call, all in the type and on the device of the weights. With the same weights,
thread count and machine, the same calls give the same bits: nothing depends on which blocks a
sequence got, on where the cache lies, or on what else runs. So the tokens of a decode after a
transfer can be compared with those of a single process without tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvxfer.errors import InvalidArgument
from kvxfer.reference.collective import Collective
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.experts import Experts, route
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.parameters import FeedForward, Layer, Linear, Parameters, Router
from kvxfer.reference.rope import inverse_frequencies, rotate, rotation
from kvxfer.reference.shards import WHOLE
from kvxfer.reference.weights import FINAL_NORM


class LlamaModel:
    """A model with its weights, or one rank of it. Any thread may call it; while apply() runs, no
    other thread may.

    With a `collective` all its ranks make the same calls, each with a cache for its KV heads
    (`shards.local_config`), and each gets the same logits. Without one nothing is exchanged.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, Tensor],
        collective: Collective | None = None,
        dtype: torch.dtype | None = None,
        experts: Experts | None = None,
    ) -> None:
        """`weights` has the boxes of this rank, by the names of `weight_shapes(config)`; they are
        copied. `dtype` is the type that the model computes in; None takes that of the weights.
        `experts` computes the experts of a model that has them."""
        if (experts is not None) != (config.num_experts > 0):
            raise InvalidArgument(f"{config.name} has {config.num_experts} experts in each layer")
        self.config = config
        self.weights_version = 0
        """The version of the last apply(); 0 before the first."""
        self._collective, self._experts = collective, experts
        self._shard = WHOLE if collective is None else collective.shard
        there = weights[FINAL_NORM]
        self._parameters = Parameters(config, self._shard, dtype or there.dtype, there.device)
        self._parameters.load(weights)
        self._frequencies = inverse_frequencies(config).to(self.device)

    @property
    def device(self) -> torch.device:
        return self._parameters.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._parameters.embedding.dtype

    def apply(self, weights: Mapping[str, Tensor], version: int, whole: bool = True) -> None:
        """Replaces the weights, in place, between two calls of prefill() and decode(); unless
        `whole`, only some of them.

        Raises InvalidArgument if a box is missing or of another shape, with nothing changed.
        """
        self._parameters.load(weights, whole)
        self.weights_version = version

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Tensor,
        cache: PagedKvCache,
        blocks: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Computes a whole prompt: stores its KV in the cache, and returns the last token's logits.

        `on_layer(layer)` is called before the layer's attention runs, as soon as its keys and
        values are complete in the cache, or on a GPU queued in the stream. From then on they can be
        sent while the rest is computed. An exception that it raises ends the prefill.

        Args:
            tokens: int64 [prompt length].
            blocks: int64 block table that covers the prompt.

        Returns:
            [vocab_size].
        """
        config, count = self.config, len(tokens)
        slots = cache.slots(blocks, 0, count)
        cos, sin = rotation(self._frequencies, torch.arange(count, device=self.device))
        x = self._embed(tokens)
        for index, layer in enumerate(self._parameters.layers):
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
            x = self._feed_forward(
                index, layer, x + self._summed(layer.output, attended.flatten(1))
            )
        return self._logits(x)

    @torch.inference_mode()
    def decode(self, token: int, position: int, cache: PagedKvCache, blocks: Tensor) -> Tensor:
        """Takes a step: stores the KV of `token` at `position`, attends to all positions up to it.

        Returns:
            [vocab_size], the logits of the token after it.
        """
        slots = cache.slots(blocks, position, position + 1)
        here = torch.tensor([position], device=self.device)
        cos, sin = rotation(self._frequencies, here)
        x = self._embed(torch.tensor([token], device=self.device))
        for index, layer in enumerate(self._parameters.layers):
            normed = self._norm(x, layer.input_norm)
            keys, values = self._keys_values(layer, normed, cos, sin)
            cache.write(index, slots, keys, values)
            queries = self._queries(layer, normed, cos, sin)
            attended = cache.attend(index, queries, keys, values, blocks, position + 1)
            x = self._feed_forward(
                index, layer, x + self._summed(layer.output, attended.flatten(1))
            )
        return self._logits(x)

    def _queries(self, layer: Layer, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self._heads(layer.q(normed)), cos, sin)

    def _keys_values(
        self, layer: Layer, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._heads(layer.kv(normed)).chunk(2, dim=1)
        return rotate(keys, cos, sin), values

    def _heads(self, x: Tensor) -> Tensor:
        """Reshapes [tokens, heads * head_size] to [tokens, heads, head_size]."""
        return x.view(len(x), -1, self.config.head_size)

    def _feed_forward(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        normed = self._norm(x, layer.post_attention_norm)
        match layer.mlp:
            case FeedForward(gate_up, down):
                gate, up = gate_up(normed).chunk(2, dim=-1)
                return x + self._summed(down, F.silu(gate) * up)
            case Router(gate):
                assert self._experts is not None  # noqa: S101 (checked at the beginning)
                ids, shares = route(gate(normed), self.config.experts_per_token)
                return x + self._experts(index, normed, ids, shares)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _logits(self, x: Tensor) -> Tensor:
        normed = self._norm(x, self._parameters.final_norm)
        logits = F.linear(normed, self._parameters.lm_head).squeeze(0)
        if self._collective is None:
            return logits
        return self._collective.all_gather(logits)[: self.config.vocab_size]

    def _embed(self, tokens: Tensor) -> Tensor:
        rows = self._parameters.embedding
        if self._collective is None:
            return F.embedding(tokens, rows)
        # Each row is on one rank, and zero on the others, so the sum is exact.
        here = tokens - self._shard.rank * len(rows)
        missing = (here < 0) | (here >= len(rows))
        x = F.embedding(here.masked_fill(missing, 0), rows).masked_fill(missing.unsqueeze(1), 0)
        return self._collective.all_reduce(x)

    def _summed(self, linear: Linear, x: Tensor) -> Tensor:
        """Returns the product of `x` with a matrix whose columns are split over the ranks."""
        if self._collective is None:
            return linear(x)
        product = self._collective.all_reduce(F.linear(x, linear.weight))
        return product if linear.bias is None else product + linear.bias
