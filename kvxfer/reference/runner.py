"""A model, its tokenizer and a paged cache, put together: prompt in, greedy tokens out.

Both roles of a worker and the single-process run share this; it does not know of transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from kvxfer.errors import InvalidArgument, PromptTooLong
from kvxfer.reference.checkpoint import load_config, load_weights
from kvxfer.reference.config import DEMO_CONFIG, LlamaConfig
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.tokens import Tokenizer, load_tokenizer
from kvxfer.reference.weights import seeded_weights

BLOCK_SIZE = 16  # tokens
SEED = 0
_PROCESSOR: Final = torch.device("cpu")


def load_model(
    folder: Path | None, device: torch.device = _PROCESSOR
) -> tuple[LlamaModel, Tokenizer]:
    """Loads the model of a checkpoint folder, or the demo model with seeded weights and byte
    tokens.

    Raises:
        InvalidArgument: the folder holds no model this engine runs; the text says why.
        NotBuilt: its tokenizer needs a package that is not installed.
    """
    config = DEMO_CONFIG if folder is None else load_config(folder)
    tokenizer = load_tokenizer(folder)
    weights = seeded_weights(config, SEED) if folder is None else load_weights(folder, config)
    return LlamaModel(config, {name: each.to(device) for name, each in weights.items()}), tokenizer


class Model(Protocol):
    """A `LlamaModel`, or an object that stands for several ranks."""

    config: LlamaConfig

    @property
    def device(self) -> torch.device: ...

    @property
    def weights_version(self) -> int: ...

    def prefill(
        self,
        tokens: Tensor,
        cache: PagedKvCache,
        blocks: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor: ...

    def decode(self, token: int, position: int, cache: PagedKvCache, blocks: Tensor) -> Tensor: ...


class ModelRunner:
    """A runner of one model over one cache.

    Thread-safe for disjoint blocks: calls that use different blocks may run at the same time.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, cache: PagedKvCache) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache

    @property
    def config(self) -> LlamaConfig:
        return self.model.config

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Returns the token ids of a prompt.

        Raises:
            InvalidArgument: it is empty, or an id is outside the vocabulary.
        """
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise InvalidArgument("the prompt is empty; give at least one token")
        for token in tokens:
            if not 0 <= token < self.config.vocab_size:
                raise InvalidArgument(
                    f"token {token} of the prompt is outside the vocabulary of "
                    f"{self.config.vocab_size} of {self.config.name}"
                )
        return tokens

    def blocks_for(self, prompt_length: int, max_tokens: int) -> int:
        """Returns the number of blocks that a prompt and its output take; the last output token is
        never stored.

        Raises:
            PromptTooLong: they do not fit the model's context, or not even an empty cache.
        """
        positions = prompt_length + max_tokens - 1
        what = f"a prompt of {prompt_length} tokens with {max_tokens} tokens of output"
        if positions > self.config.max_position:
            raise PromptTooLong(
                f"{what} does not fit the context of {self.config.name}, "
                f"{self.config.max_position} tokens; shorten it"
            )
        if positions > self.cache.num_tokens:
            raise PromptTooLong(
                f"{what} does not fit the KV cache of {self.cache.num_blocks} blocks of "
                f"{self.cache.block_size} tokens; shorten it or start with more --blocks"
            )
        return -(-positions // self.cache.block_size)

    def prefill(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
    ) -> int:
        """Writes the KV of a prompt into `blocks` and returns the first output token.

        `on_layer` as in `LlamaModel.prefill`.
        """
        device = self.model.device
        logits = self.model.prefill(
            torch.tensor(tokens, device=device),
            self.cache,
            torch.tensor(blocks, device=device),
            on_layer,
        )
        return int(logits.argmax())

    def decode(
        self, token: int, prompt_length: int, blocks: Sequence[int], max_tokens: int
    ) -> Iterator[int]:
        """Yields the output tokens after `token`, the first one, until there are `max_tokens` in
        all.

        `blocks` covers prompt and output, with the prompt's KV in it. The model takes a step for
        each token, when it is requested.
        """
        table = torch.tensor(blocks, device=self.model.device)
        for position in range(prompt_length, prompt_length + max_tokens - 1):
            token = int(self.model.decode(token, position, self.cache, table).argmax())
            yield token

    def generate(
        self, prompt: str | Sequence[int], max_tokens: int, *, ignore_eos: bool = False
    ) -> list[int]:
        """Returns the greedy output of a prompt, computed in one process with the whole cache.

        Ends with the model's end-of-sequence token, unless `ignore_eos`.

        Raises:
            InvalidArgument, PromptTooLong: as `encode` and `blocks_for`.
        """
        tokens = self.encode(prompt)
        blocks = range(self.blocks_for(len(tokens), max_tokens))
        output = [self.prefill(tokens, blocks)]
        if ignore_eos or not self.ends(output[0]):
            for token in self.decode(output[0], len(tokens), blocks, max_tokens):
                output.append(token)
                if not ignore_eos and self.ends(token):
                    break
        return output

    def ends(self, token: int) -> bool:
        """True if `token` ends a sequence."""
        return token in self.config.eos_token_ids
