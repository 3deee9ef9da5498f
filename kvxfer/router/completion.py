"""A request as the router sends it on, and an answer put together from the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvxfer.prefix_hashes import NO_HASHES, AskedHashes
from kvxfer.router.exchange import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A completion of one prompt."""

    request_id: str
    model: str
    body: Mapping[str, Any]
    """What workers get, without what the router adds."""
    prompt_tokens: int | None
    """As far as it is known without a tokenizer."""
    prefix: AskedHashes = NO_HASHES
    """Of a prompt of token ids."""
    arrived: float = field(default_factory=time.monotonic)


async def collect(chunks: AsyncGenerator[Chunk, None]) -> Chunk:
    """The completion that a stream is the pieces of."""
    choices: dict[int, dict[str, Any]] = {}
    completion: Chunk = {}
    async with aclosing(chunks):
        async for chunk in chunks:
            completion.update(chunk)
            for piece in chunk["choices"]:
                _add(choices.setdefault(piece["index"], {}), piece)
    completion["choices"] = [choices[index] for index in sorted(choices)]
    return completion


def _add(choice: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        if name in ("text", "token_ids") and name in choice:
            choice[name] += value
        else:
            choice[name] = value
    choice.setdefault("finish_reason", None)
