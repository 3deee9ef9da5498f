"""The bodies of OpenAI's API: what the router has to know of them. The rest is for the workers,
which refuse what they cannot do."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvxfer.prefix_hashes import NO_HASHES, asked_hashes
from kvxfer.router.chat import Message, prompt_of
from kvxfer.router.completion import CompletionRequest
from kvxfer.router.errors import InvalidRequest

TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _passed_on(self, prompt: str | list[int]) -> dict[str, Any]:
        own = {"stream", "stream_options", "messages", "max_completion_tokens"}
        sent = self.model_dump(exclude_unset=True, exclude_none=True, exclude=own)
        return {**sent, "prompt": prompt}


class CompletionBody(_Body):
    prompt: str | list[TokenId]

    def request(self, request_id: str, bytes_per_token: float) -> CompletionRequest:
        return _request(self, request_id, self._passed_on(self.prompt), bytes_per_token)


class ChatBody(_Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def request(self, request_id: str, bytes_per_token: float) -> CompletionRequest:
        body = self._passed_on(prompt_of(self.messages))
        if self.max_completion_tokens is not None:
            body["max_tokens"] = self.max_completion_tokens
        return _request(self, request_id, body, bytes_per_token)


B = TypeVar("B", bound=_Body)


def read_body(kind: type[B], content: bytes) -> B:
    """Raises InvalidRequest, which names the member."""
    try:
        body = kind.model_validate_json(content)
    except ValidationError as error:
        raise _invalid(error) from None
    if "kv_transfer_params" in (body.model_extra or {}):
        raise InvalidRequest(
            "kv_transfer_params: the router makes them; leave them out", "kv_transfer_params"
        )
    return body


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is no JSON: {first['ctx']['error']}")
    # Of a union pydantic names the kinds it tried too; the member is what the client knows.
    param = next((str(part) for part in first["loc"]), "")
    if not param:
        return InvalidRequest("the body is no JSON object")
    if param == "prompt" and len(first["loc"]) > 1:
        return InvalidRequest("prompt: it is text or a list of token ids, one prompt", param)
    where = ".".join(str(part) for part in first["loc"])
    return InvalidRequest(f"{where}: {first['msg']}", param)


def _request(
    body: _Body, request_id: str, passed_on: dict[str, Any], bytes_per_token: float
) -> CompletionRequest:
    prompt = passed_on["prompt"]
    if isinstance(prompt, str):
        tokens = math.ceil(len(prompt.encode()) / bytes_per_token)
        prefix = NO_HASHES
    else:
        tokens, prefix = len(prompt), asked_hashes(prompt, body.model)
    return CompletionRequest(
        request_id=request_id,
        model=body.model,
        body=passed_on,
        prompt_tokens=tokens or None,
        prefix=prefix,
    )
