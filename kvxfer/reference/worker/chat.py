"""Chats: messages become one prompt, a completion of it becomes a message.

The prompt is, for each message, its role in `<|…|>` on one line and its content on the
next lines; `<|assistant|>` at the end asks for the answer:

    <|system|>
    You are brief.
    <|user|>
    Hello!
    <|assistant|>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvxfer.reference.worker.completions import CompletionRequest, RequestBody

Chunk = dict[str, Any]
"""A completion or an event of its stream, as JSON."""


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat; only text is supported."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(RequestBody):
    """A request for the greedy answer to one chat. Unsupported options are refused, not ignored."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="Overrides max_tokens.")

    def completion(self) -> CompletionRequest:
        fields = self.model_dump(exclude={"messages", "max_completion_tokens"})
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        return CompletionRequest(prompt=prompt_of(self.messages), **fields)


def prompt_of(messages: Sequence[Message]) -> str:
    said = "".join(f"<|{message.role}|>\n{message.text}\n" for message in messages)
    return f"{said}<|assistant|>\n"


def chat_completion(completion: Chunk) -> Chunk:
    """Converts a completion into the answer of a chat."""
    return {
        **completion,
        "id": _id(completion),
        "object": "chat.completion",
        "choices": [
            _turned(choice, "message", {"role": "assistant", "content": choice["text"]})
            for choice in completion["choices"]
        ],
    }


class ChatChunks:
    """A converter of one completion's chunks into those of a chat; the first names the role."""

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def turn(self, chunk: Chunk) -> Chunk:
        choices = [_turned(choice, "delta", self._delta(choice)) for choice in chunk["choices"]]
        told = {"id": _id(chunk), "object": "chat.completion.chunk"}
        for choice in choices:
            if (prompt := choice.pop("prompt_token_ids", None)) is not None:
                told["prompt_token_ids"] = prompt
        return {**chunk, **told, "choices": choices}

    def _delta(self, choice: dict[str, Any]) -> dict[str, str]:
        delta = {"content": choice["text"]}
        if choice["index"] not in self._begun:
            self._begun.add(choice["index"])
            delta = {"role": "assistant", **delta}
        return delta


def _id(chunk: Chunk) -> str:
    return f"chat{chunk['id']}"


def _turned(choice: dict[str, Any], name: str, said: dict[str, str]) -> dict[str, Any]:
    rest = {key: value for key, value in choice.items() if key != "text"}
    return {"finish_reason": None, **rest, name: said}
