"""The bodies of OpenAI's API: what the router has to know of them. The rest is for the workers,
which refuse what they cannot do."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvxfer.prefix_hashes import NO_HASHES, AskedHashes, asked_hashes
from kvxfer.router.completion import CompletionRequest
from kvxfer.router.errors import InvalidRequest
from kvxfer.router.exchange import CHAT, COMPLETIONS

# What a prompt is made of, in the words of vLLM's /tokenize.
_OF_TEXT: Final = frozenset({"model", "prompt", "add_special_tokens"})
_OF_CHAT: Final = frozenset(
    {
        *("model", "messages", "tools", "chat_template", "chat_template_kwargs"),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message"),
    }
)

TokenId = Annotated[int, Field(ge=0, lt=1 << 63)]


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

    def _request(
        self,
        request_id: str,
        path: str,
        prompt_tokens: int,
        arrived: float,
        prefix: AskedHashes = NO_HASHES,
        text: frozenset[str] = frozenset(),
    ) -> CompletionRequest:
        """`text`: the members that make the prompt of it, where nothing else does."""
        own = {"stream", "stream_options"}
        return CompletionRequest(
            request_id=request_id,
            path=path,
            model=self.model,
            body=self.model_dump(exclude_unset=True, exclude_none=True, exclude=own),
            prompt_tokens=prompt_tokens or None,
            prefix=prefix,
            text=self.model_dump(exclude_unset=True, exclude_none=True, include=set(text)) or None,
            arrived=arrived,
        )


class CompletionBody(_Body):
    prompt: str | list[TokenId]

    def request(self, request_id: str, bytes_per_token: float, arrived: float) -> CompletionRequest:
        if isinstance(self.prompt, str):
            tokens = math.ceil(len(self.prompt.encode()) / bytes_per_token)
            return self._request(request_id, COMPLETIONS, tokens, arrived, text=_OF_TEXT)
        prefix = asked_hashes(self.prompt, self.model)
        return self._request(request_id, COMPLETIONS, len(self.prompt), arrived, prefix)


class ChatBody(_Body):
    """The workers make the prompt of the messages."""

    messages: list[dict[str, Any]] = Field(min_length=1)

    def request(self, request_id: str, bytes_per_token: float, arrived: float) -> CompletionRequest:
        nbytes = sum(len(_text(message.get("content")).encode()) for message in self.messages)
        plain = all(_is_text(message.get("content")) for message in self.messages)
        tokens = math.ceil(nbytes / bytes_per_token)
        members = _OF_CHAT if plain else frozenset[str]()
        return self._request(request_id, CHAT, tokens, arrived, text=members)


def _is_text(content: Any) -> bool:
    return not isinstance(content, list) or all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    )


def _text(content: Any) -> str:
    """What is text in the content of a message."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


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
