"""A request as the router sends it on, and an answer put together from the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.prefix_hashes import NO_HASHES, AskedHashes
from kvxfer.router.exchange import Chunk

# Text that comes in pieces.
_SAID: Final = frozenset(
    {"text", "content", "reasoning", "reasoning_content", "refusal", "arguments"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A completion of one prompt, or the answer to one chat."""

    request_id: str
    path: str
    """Of OpenAI's API, here and at the workers."""
    model: str
    body: Mapping[str, Any]
    """What workers get, without what the router adds."""
    prompt_tokens: int | None
    """As far as it is known without a tokenizer."""
    prefix: AskedHashes = NO_HASHES
    """Of a prompt whose token ids are known."""
    text: Mapping[str, Any] | None = None
    """What a worker's tokenizer is asked: the members that make the prompt. None for token ids, and
    where more than text makes it."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the client, for the workers."""
    arrived: float
    """By the monotonic clock of the router."""


async def collect(chunks: AsyncGenerator[Chunk, None]) -> Chunk:
    """The completion, or the answer of a chat, that a stream is the pieces of."""
    choices: dict[int, dict[str, Any]] = {}
    completion: Chunk = {}
    async with aclosing(chunks):
        async for chunk in chunks:
            for name, value in chunk.items():
                if value is not None or name not in completion:
                    completion[name] = value
            for piece in chunk["choices"]:
                _add(choices.setdefault(piece["index"], {"finish_reason": None}), piece)
    completion["object"] = completion.get("object", "text_completion").removesuffix(".chunk")
    completion["choices"] = [_whole(choices[index]) for index in sorted(choices)]
    return completion


def _add(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """What is said goes on, and so do lists; of all else the last counts."""
    for name, value in piece.items():
        had = whole.get(name)
        if had is None:
            whole[name] = value
        elif isinstance(had, dict) and isinstance(value, Mapping):
            _add(had, value)
        elif name == "tool_calls" and value:
            _add_calls(had, value)
        elif isinstance(had, list) or name in _SAID:
            whole[name] = had + (value or had[:0])
        elif value is not None:
            whole[name] = value


def _add_calls(calls: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    for piece in pieces:
        same = [call for call in calls if call.get("index") == piece.get("index")]
        if same:
            _add(same[0], piece)
        else:
            calls.append(piece)


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice with its message, where it came in deltas."""
    if "delta" not in choice:
        return choice
    message = choice.pop("delta")
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
    return {**choice, "message": message}
