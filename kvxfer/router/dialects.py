"""The routes of inference engines that generate tokens: what the router must know of the bodies,
answers and streams of each. Everything else passes unchanged.

The members are those of vLLM 0.32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

from kvxfer.router.bodies import Members, as_integer, has, is_on, text_bytes, token_ids, value_of

JsonObject = dict[str, Any]


class Prompt(NamedTuple):
    """A prompt as far as it is known before a worker has seen it."""

    nbytes: int = 0
    """The bytes of the text, if it is text."""
    ids: list[int] | None = None
    """The tokens, if the client sent them."""
    more: int = 0
    """The number of tokens of the request's further prompts, if the client sent tokens."""


class Dialect:
    """A route, with its bodies, answers and streams. Stateless."""

    path: str
    needs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of members; a body needs at least one member of each."""
    limit: ClassVar[str] = "max_tokens"
    """The member that bounds the output: prefill computes one token."""
    not_for_prefill: ClassVar[frozenset[str]] = frozenset()
    """Members that only decode gets, in addition to those of streams."""
    for_prefill: ClassVar[Mapping[str, bool]] = MappingProxyType({})
    """Members of prefill's kv_transfer_params that decode does not get."""
    tokenized: ClassVar[frozenset[str]] = frozenset()
    """Members that make the prompt, as vLLM's /tokenize names them; empty if it cannot tokenize the
    route's prompts."""
    prompt_usage: ClassVar[tuple[str, ...]] = ()
    """Members of an answer's usage that describe the prompt; prefill's answer has their values."""
    tells_usage: ClassVar[re.Pattern[bytes]]
    """A pattern that finds these in an answer or in an event."""

    def lacks(self, members: Members | None) -> str:
        """Returns the required member that is missing; "body" if that is no JSON object (None);
        empty if nothing is missing."""
        if not self.needs:
            return ""
        if members is None:
            return "body"
        missing = (names for names in self.needs if not any(has(members, name) for name in names))
        return next(missing, ("",))[0]

    def alone(self, members: Members) -> str:
        """Returns the member that requires one worker alone; empty if a pair can serve it."""
        raise NotImplementedError

    def prompt(self, members: Members) -> Prompt:
        raise NotImplementedError

    def is_text(self, members: Members) -> bool:
        """Whether the prompt is text alone, so that a tokenizer knows all of it."""
        raise NotImplementedError

    def renders(self, members: Members) -> bool:
        """Whether a template makes the prompt, and both workers may get its tokens instead. vLLM
        renders it at `path`/render."""
        return self.is_text(members)

    def prompt_logprobs(self, members: Members) -> bool:  # noqa: ARG002
        """Whether the request asks for logprobs of the prompt, which prefill computes."""
        return False

    def lacks_logprobs(self, of_prefill: JsonObject) -> bool:
        """Whether prefill's answer has logprobs of only a part of the prompt."""
        told, usage = self._prompt_logprobs_in(of_prefill), _usage(of_prefill) or {}
        return isinstance(told, list) and len(told) != usage.get("prompt_tokens", len(told))

    def _prompt_logprobs_in(self, answer: JsonObject) -> Any:  # noqa: ARG002
        return None

    def ended(self, last: bytes) -> bool:
        """Whether a stream that ends with these events is complete."""
        return b"data: [DONE]" in last

    def error_body(self, error: JsonObject) -> JsonObject:
        """Returns the body of an error of the router."""
        return {"error": error}

    def error_event(self, error: JsonObject) -> bytes:
        """Returns the last event of a stream that breaks off."""
        return b"data: " + json.dumps(self.error_body(error)).encode() + b"\n\n"

    def with_prompt(self, answer: JsonObject, of_prefill: JsonObject | None) -> None:
        """Copies what prefill's answer says of the prompt into decode's answer, or one of its
        events. If prefill's answer is lost (None), the usage says null."""
        usage, known = _usage(answer), _usage(of_prefill or {}) or {}
        for name in self.prompt_usage:
            if usage is not None and (told := usage.get(name)) is not None:
                usage[name] = _in_the_form_of(told, known.get(name))


def _usage(answer: JsonObject) -> JsonObject | None:
    """Returns the usage of an answer, or of an event of /v1/responses or /v1/messages."""
    for holder in (answer, answer.get("response"), answer.get("message")):
        if isinstance(holder, dict) and isinstance(usage := holder.get("usage"), dict):
            return usage
    return None


def _choices(answer: JsonObject) -> list[JsonObject]:
    choices = answer.get("choices")
    found = choices if isinstance(choices, list) else []
    return [choice for choice in found if isinstance(choice, dict)]


def _in_the_form_of(told: Any, known: Any) -> Any:
    """Returns prefill's value without the null members that decode's value leaves out."""
    if not isinstance(told, dict) or not isinstance(known, dict):
        return known
    return {name: value for name, value in known.items() if value is not None or name in told}


class _OpenAi(Dialect):
    """Completions and chat completions."""

    # If a request has a seed, vLLM 0.32 on a CPU stops at a prompt that it computes in chunks.
    not_for_prefill = frozenset(
        {"max_completion_tokens", "min_tokens", "n", "best_of", "seed", "return_token_ids"}
    )
    prompt_usage = ("prompt_tokens_details",)
    tells_usage = re.compile(rb'"prompt_tokens_details": ?\{')

    def prompt_logprobs(self, members: Members) -> bool:
        wanted = as_integer(value_of(members, "prompt_logprobs"))
        return wanted is not None and wanted >= -1


class _Completions(_OpenAi):
    path = "/v1/completions"
    needs = (("prompt", "prompt_embeds"),)
    tokenized = frozenset({"model", "prompt", "add_special_tokens"})

    def alone(self, members: Members) -> str:
        if value_of(members, "prompt_embeds") is not None:
            return "prompt_embeds"
        if len(self._prompts(members)) > 1:
            return "prompt"
        if as_integer(value_of(members, "max_tokens")) == 0:
            return "max_tokens"  # nothing is left for decode
        if is_on(value_of(members, "echo")) and value_of(members, "logprobs") is not None:
            return "echo"  # the logprobs of prompt and answer are one list
        return "use_beam_search" if is_on(value_of(members, "use_beam_search")) else ""

    def prompt(self, members: Members) -> Prompt:
        first, *more = self._prompts(members) or [None]
        others = sum(len(token_ids(each) or ()) for each in more)
        return Prompt(text_bytes([first, *more]), token_ids(first), others)

    def is_text(self, members: Members) -> bool:
        return isinstance(value_of(members, "prompt"), str)

    def renders(self, members: Members) -> bool:  # noqa: ARG002
        return False

    def with_prompt(self, answer: JsonObject, of_prefill: JsonObject | None) -> None:
        super().with_prompt(answer, of_prefill)
        if (logprobs := self._prompt_logprobs_in(of_prefill or {})) is not None:
            for choice in _choices(answer):
                choice["prompt_logprobs"] = logprobs

    def _prompt_logprobs_in(self, answer: JsonObject) -> Any:
        return next(iter(_choices(answer)), {}).get("prompt_logprobs")

    def _prompts(self, members: Members) -> list[Any]:
        prompt = value_of(members, "prompt")
        several = isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt)
        return prompt if several else [prompt]


class _Chat(_OpenAi):
    path = "/v1/chat/completions"
    needs = (("messages",),)
    tokenized = frozenset(
        {
            *("model", "messages", "tools", "chat_template", "chat_template_kwargs"),
            *("add_special_tokens", "add_generation_prompt", "continue_final_message"),
        }
    )

    def alone(self, members: Members) -> str:
        for name in ("use_beam_search", "echo"):  # with echo, vLLM returns logprobs of the prompt
            if is_on(value_of(members, name)):
                return name
        return ""

    def prompt(self, members: Members) -> Prompt:
        return Prompt(text_bytes(value_of(members, "messages")))

    def is_text(self, members: Members) -> bool:
        messages = value_of(members, "messages")
        return isinstance(messages, list) and all(_says_text(message) for message in messages)

    def renders(self, members: Members) -> bool:
        # A worker that gets tokens has no text of the prompt to return.
        return super().renders(members) and not is_on(value_of(members, "return_prompt_text"))

    def with_prompt(self, answer: JsonObject, of_prefill: JsonObject | None) -> None:
        super().with_prompt(answer, of_prefill)
        if (logprobs := self._prompt_logprobs_in(of_prefill or {})) is not None:
            answer["prompt_logprobs"] = logprobs

    def _prompt_logprobs_in(self, answer: JsonObject) -> Any:
        return answer.get("prompt_logprobs")


def _says_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return not isinstance(content, list) or all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    )


class _Responses(Dialect):
    path = "/v1/responses"
    needs = (("input",),)
    limit = "max_output_tokens"
    prompt_usage = ("input_tokens_details",)
    tells_usage = re.compile(rb'"input_tokens_details": ?\{')

    def alone(self, members: Members) -> str:
        if is_on(value_of(members, "background")):
            return "background"
        for name in ("previous_response_id", "previous_input_messages"):
            if value_of(members, name) is not None:
                return name
        tools = value_of(members, "tools")
        for tool in tools if isinstance(tools, list) else ():
            if not isinstance(tool, dict) or tool.get("type") != "function":
                return "tools"  # the worker itself calls them, and computes several prompts
        return ""

    def prompt(self, members: Members) -> Prompt:
        said = (value_of(members, name) for name in ("instructions", "input"))
        return Prompt(sum(map(text_bytes, said)))

    def is_text(self, members: Members) -> bool:
        items = value_of(members, "input")
        return not isinstance(items, list) or b'"input_image"' not in bytes(members["input"])

    def ended(self, last: bytes) -> bool:  # noqa: ARG002
        return True  # HTTP shows if it breaks off

    def error_event(self, error: JsonObject) -> bytes:
        told = {"type": "error", **{name: error[name] for name in ("code", "message", "param")}}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"


class _Messages(Dialect):
    """Anthropic's API."""

    path = "/v1/messages"
    # vLLM then knows that its limit of tokens is not the client's.
    for_prefill = MappingProxyType({"do_remote_decode": True})
    needs = (("model",), ("messages",), ("max_tokens",))
    prompt_usage = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    tells_usage = re.compile(rb'"cache_read_input_tokens": ?\d')

    def alone(self, members: Members) -> str:  # noqa: ARG002
        return ""

    def prompt(self, members: Members) -> Prompt:
        said = (value_of(members, name) for name in ("system", "messages"))
        return Prompt(sum(map(text_bytes, said)))

    def is_text(self, members: Members) -> bool:
        return "messages" in members and b'"image"' not in bytes(members["messages"])

    def ended(self, last: bytes) -> bool:  # noqa: ARG002
        return True

    def error_body(self, error: JsonObject) -> JsonObject:
        return {"type": "error", "error": {"type": error["type"], "message": error["message"]}}

    def error_event(self, error: JsonObject) -> bytes:
        return b"event: error\n" + super().error_event(error)


class _SglangGenerate(Dialect):
    """SGLang's own API. Its prefill computes one token by itself."""

    path = "/generate"
    needs = (("text", "input_ids", "input_embeds"),)
    limit = ""
    tells_usage = re.compile(rb"(?!)")  # it has no usage

    def alone(self, members: Members) -> str:
        for name in ("text", "input_ids"):
            several = value_of(members, name)
            if isinstance(several, list) and any(isinstance(part, str | list) for part in several):
                return name
        return "input_embeds" if value_of(members, "input_embeds") is not None else ""

    def prompt(self, members: Members) -> Prompt:
        ids = token_ids(value_of(members, "input_ids"))
        return Prompt(text_bytes(value_of(members, "text")), ids)

    def is_text(self, members: Members) -> bool:  # noqa: ARG002
        return False

    def renders(self, members: Members) -> bool:  # noqa: ARG002
        return False


class _Single(Dialect):
    """A route without a KV cache to move: one worker answers."""

    tells_usage = re.compile(rb"(?!)")

    def __init__(self, path: str) -> None:
        self.path = path

    def alone(self, members: Members) -> str:  # noqa: ARG002
        return self.path

    def prompt(self, members: Members) -> Prompt:  # noqa: ARG002
        return Prompt()

    def is_text(self, members: Members) -> bool:  # noqa: ARG002
        return False

    def ended(self, last: bytes) -> bool:  # noqa: ARG002
        return True  # HTTP shows if it breaks off


COMPLETIONS: Final[Dialect] = _Completions()
CHAT: Final[Dialect] = _Chat()
RESPONSES: Final[Dialect] = _Responses()
MESSAGES: Final[Dialect] = _Messages()

GENERATING: Final = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, _SglangGenerate())
SINGLE: Final[Mapping[str, tuple[Dialect, ...]]] = {
    "POST": tuple(
        _Single(path)
        for path in (
            *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
            *("/v1/chat/completions/batch", "/v1/responses/{response_id}/cancel"),
            *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
            *("/classify", "/pooling"),
        )
    ),
    "GET": (_Single("/version"), _Single("/v1/responses/{response_id}")),
}
"""Routes that one worker answers, by method."""
