"""`POST /tokenize`, in vLLM's form: routers reserve blocks for the number of tokens it returns."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvxfer.reference.worker.chat import Message, prompt_of


class TokenizeRequest(BaseModel):
    """A prompt, or the messages of a chat. Unsupported options are refused, not ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="If given, it must be the worker's model.")
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self

    def text(self) -> str:
        return prompt_of(self.messages) if self.messages else self.prompt or ""


class Tokenized(BaseModel):
    """The prompt as the model gets it."""

    tokens: list[int]
    count: int
    max_model_len: int = Field(description="The most tokens of a prompt and its output.")
