"""A stream that goes on at another worker: which requests allow it, the request to that worker,
and its events as events of the client's stream.

The other worker gets a completion, also for a chat. Its prompt is the tokens of the prompt and of
the text that the client has; the worker knows nothing else. A request is not continued if its
answer depends on more: on a seed's random numbers, on the state of a parser or of a grammar, or on
counts of output tokens. Nor is one with a member that is not listed here.

The members are those of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from kvxfer.router.asked import Asked, read_request
from kvxfer.router.bodies import as_integer, as_raw, has, value_of
from kvxfer.router.dialects import CHAT, COMPLETIONS
from kvxfer.router.event_bytes import data_of, events_in, with_data
from kvxfer.router.transcript import Transcript, choice_of, usage_of
from kvxfer.unreadable import UNREADABLE

JsonObject = dict[str, Any]

# Members that the other worker gets unchanged: they affect each token alone, or the answer's form.
_KEPT: Final = frozenset(
    {
        *("model", "stream", "stream_options", "stream_interval", "user", "priority"),
        *("request_id", "session_id", "cache_salt", "return_token_ids", "weights_version"),
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("allowed_token_ids", "stop", "stop_token_ids", "include_stop_str_in_output"),
        *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    }
)
# Members of the prompt (tokens replace them), limits (they are reduced), and what vLLM ignores.
_REPLACED: Final = frozenset(
    {
        *("prompt", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
        *("messages", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "documents", "reasoning_effort", "return_prompt_text"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "seed", "parallel_tool_calls"),
        *("return_tokens_as_token_ids", "length_penalty", "metadata", "store", "service_tier"),
    }
)
_OFF: Final = (b"false",)
_EMPTY: Final = (b"[]",)
_ZERO: Final = (b"0", b"0.0")
# Other members allow a continuation with these values, or null.
_HARMLESS: Final[Mapping[str, tuple[bytes, ...]]] = {
    "n": (b"1",),
    "best_of": (b"1",),
    "echo": _OFF,
    "use_beam_search": _OFF,
    "logprobs": _OFF,
    "top_logprobs": (b"0",),
    "logprob_token_ids": _EMPTY,
    "tools": _EMPTY,
    "tool_choice": (b'"none"',),
    "response_format": (b'{"type":"text"}',),
    "include_reasoning": (b"true",),
    "thinking_token_budget": (b"-1",),
    "presence_penalty": _ZERO,
    "frequency_penalty": _ZERO,
    "bad_words": _EMPTY,
    "watermarking": _OFF,
    "vllm_xargs": (b"{}",),
}
_IDS: Final = ("prompt_token_ids", "token_ids")
# vLLM's default for completions.
_MAX_TOKENS: Final = 16


def prevented_by(asked: Asked) -> str:
    """Returns the member, or the route, that keeps the request from going on at another worker;
    empty if it can."""
    members, dialect = asked.members, asked.dialect
    if dialect not in (COMPLETIONS, CHAT):
        return dialect.path
    for name in members:
        if not has(members, name) or name in _REPLACED:
            continue
        value = value_of(members, name)
        if name in _KEPT:
            harmless = value is not None  # else the router cannot read it
        else:
            harmless = msgspec.json.encode(value) in _HARMLESS.get(name, ())
        if not harmless:
            return name
    greedy = msgspec.json.encode(value_of(members, "temperature")) in _ZERO
    if has(members, "seed") and not greedy:
        return "seed"
    if dialect is CHAT:
        return "" if dialect.is_text(members) else "messages"
    return "prompt" if dialect.alone(members) == "prompt" else ""


def limit_of(asked: Asked) -> int | None:
    """Returns the answer's limit of tokens; None if only the model's context length bounds it."""
    limit = asked.dialect.limit
    for name in ("max_completion_tokens", limit) if asked.dialect is CHAT else (limit,):
        if has(asked.members, name):
            return as_integer(value_of(asked.members, name))
    return _MAX_TOKENS if asked.dialect is COMPLETIONS else None


class Continuation:
    """The rest of a stream at another worker. Loop only."""

    def __init__(
        self,
        asked: Asked,
        transcript: Transcript,
        prompt: list[int],
        limit: int,
        of_prefill: JsonObject | None,
    ) -> None:
        """Takes the whole answer's `limit` of tokens, and the first prefill worker's answer."""
        self._asked = asked
        self._transcript = transcript
        self._prompt = prompt
        self._tokens = transcript.tokens
        self._limit = limit
        self._of_prefill = of_prefill
        self.certain = transcript.certain or not self._tokens
        """Whether the text of the last token is known to be complete."""

    def drop(self, tokens: int) -> None:
        """Leaves out the last tokens, whose text the client lacks: they are computed again."""
        self._tokens = self._tokens[: len(self._tokens) - tokens]

    def request(self, arrived: float) -> Asked:
        """Returns the request to another worker, or to a pair."""
        asked, told = self._asked, len(self._tokens)
        members = {k: v for k, v in asked.members.items() if k in _KEPT and has(asked.members, k)}
        members["prompt"] = as_raw(self._prompt + self._tokens)
        members["max_tokens"] = as_raw(self._limit - told)
        if least := as_integer(value_of(asked.members, "min_tokens")):
            members["min_tokens"] = as_raw(max(least - told, 0))
        query = asked.path.partition("?")[2]
        request = read_request(
            COMPLETIONS,
            msgspec.json.encode(members),
            request_id=asked.request_id,
            path=COMPLETIONS.path + (f"?{query}" if query else ""),
            headers=asked.headers,
            tenant=asked.tenant,
            arrived=arrived,
        )
        return replace(request, model=asked.model)

    def take(self, whole: bytes) -> bytes:
        """Returns events of the other worker as events of the client's stream."""
        return b"".join(map(self._take, events_in(whole)))

    def _take(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        try:
            told = msgspec.json.decode(data, type=JsonObject)
        except UNREADABLE:  # [DONE]
            return event
        if "error" in told:
            return event
        told |= self._transcript.head
        if choice := choice_of(told):
            # The prompt of the continuation is not the client's.
            hidden = ("prompt_token_ids",) if self._transcript.tells_ids else _IDS
            choice |= {name: None for name in hidden if name in choice}
            if self._asked.dialect is CHAT:
                told["choices"] = [_of_chat(choice)]
        usage = told.get("usage")
        if isinstance(usage, dict):
            generated = len(self._tokens) + (as_integer(usage.get("completion_tokens")) or 0)
            usage |= usage_of(len(self._prompt), generated)
            self._asked.dialect.with_prompt(told, self._of_prefill)
        return with_data(event, told)


def _of_chat(choice: JsonObject) -> JsonObject:
    """Returns the choice of a completion's event as the choice of a chat's event."""
    left_out = {"text", "prompt_token_ids"}
    if choice.get("finish_reason") is None:
        left_out.add("stop_reason")
    rest = {name: value for name, value in choice.items() if name not in left_out}
    return {**rest, "delta": {"content": choice.get("text") or ""}}
