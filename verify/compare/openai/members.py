"""The members of vLLM's request bodies, from its own OpenAPI document, and values of four classes
for each: absent, ordinary, edge, wrong type.

A member that this file does not know gets values by its schema, so that a newer vLLM is covered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

CLASSES: Final = ("absent", "ordinary", "edge", "wrong")

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
ROUTES: Final = (COMPLETIONS, CHAT)

_SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
_FUNCTION: Final = {"name": "look", "description": "d", "parameters": _SCHEMA}
TOOL: Final = {"type": "function", "function": _FUNCTION}
_HUGE: Final = 1 << 70


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one member."""

    ordinary: Any
    edge: tuple[Any, ...] = (None,)
    wrong: tuple[Any, ...] = ([{}],)
    needs: Mapping[str, Any] = field(default_factory=dict)
    """The other members that the ordinary value needs to have a meaning."""

    def of(self, kind: str) -> tuple[Any, ...]:
        return {"ordinary": (self.ordinary,), "edge": self.edge, "wrong": self.wrong}[kind]


def _flag(**needs: Any) -> Values:
    return Values(True, (False, None, "on", 1), ("maybe", [1]), needs)


def _number(ordinary: float, *edge: Any, **needs: Any) -> Values:
    return Values(ordinary, (*edge, None), ("x", [1]), needs)


def _text(ordinary: str, *edge: Any, **needs: Any) -> Values:
    return Values(ordinary, (*edge, None), (7, ["a"]), needs)


_SAMPLED: Final = {"temperature": 1.0}

_KNOWN: Final[Mapping[str, Values]] = {
    "model": Values("tiny", ("", "none-such", None), (7, ["tiny"])),
    "add_generation_prompt": Values(False, (True, None), ("maybe",)),
    "add_special_tokens": _flag(),
    "allowed_token_ids": Values(list(range(70, 100)), ([], [100_000], None), ("x", ["x"])),
    "bad_words": Values(["e", "the"], ([], [""]), ("x", [7])),
    "cache_salt": _text("salt", "", "s" * 1025),
    "chat_template": _text("{{ messages }}", ""),
    "chat_template_kwargs": Values({"name": "x"}, ({}, None), ("x", [1])),
    "continue_final_message": _flag(add_generation_prompt=False),
    "documents": Values([{"title": "t", "text": "d"}], ([], None), ("x", [7])),
    "echo": _flag(),
    "ec_transfer_params": Values({"a": 1}, ({}, None), ("x", [1])),
    "frequency_penalty": _number(0.5, -2, 2, 2.5),
    "ignore_eos": _flag(),
    "include_reasoning": Values(False, (True, None), ("maybe",)),
    "include_stop_str_in_output": _flag(stop=["e"]),
    "kv_transfer_params": Values({}, (None,), ("x", [1])),
    "length_penalty": _number(0.8, 0, -1),
    "logit_bias": Values({"75": 5.0}, ({}, {"100000": 1.0}, {"75": 1000}, None), ("x", [1])),
    "logprob_token_ids": Values([75, 76], ([], [100_000], None), ("x", ["x"])),
    "max_completion_tokens": _number(5, 1, 3.0, 0, -1, 100_000, _HUGE),
    "max_tokens": _number(5, 1, 3.0, 0, -1, 100_000, 2.5, _HUGE),
    "media_io_kwargs": Values({"image": {}}, ({}, None), ("x", {"image": 7})),
    "min_p": _number(0.1, 0, 1, 1.5),
    "min_tokens": _number(3, 0, -1, 1000),
    "mm_payload": Values("none", ("tensors",), (7, "other")),
    "mm_processor_kwargs": Values({}, (None,), ("x", [1])),
    "n": Values(2, (1, 0, -1, 100_000, 2.0), ("x", [1]), _SAMPLED),
    "parallel_tool_calls": Values(False, (True, None), ("maybe",)),
    "presence_penalty": _number(0.5, -2, 2, -2.5),
    "priority": _number(0, 1, -1, _HUGE),
    "prompt_embeds": _text("AAAA", ""),
    "prompt_logprobs": _number(1, 0, -1, -2, 20, 21, 2.0),
    "reasoning_effort": _text("low", "none", "extreme"),
    "repetition_detection": Values(
        {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}, ({}, None), ("x", [1])
    ),
    "repetition_penalty": _number(1.2, 0, 2.5, -1),
    "request_id": Values("req-7", ("", "r" * 200, "two lines\n"), (7, ["a"])),
    "response_format": Values(
        {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
        ({"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "x"}, None),
        ("x", [1]),
    ),
    "return_mm_kwargs": _flag(),
    "return_prompt_text": _flag(),
    "return_token_ids": _flag(),
    "return_token_offsets": _flag(),
    "return_tokens_as_token_ids": _flag(logprobs=1),
    "routed_experts_prompt_start": Values(0, (5, -1, _HUGE), ("x", [1])),
    "seed": _number(9, 0, -1, 9.0, -(1 << 63), (1 << 63) - 1, 1 << 63),
    "session_id": _text("s-1", ""),
    "skip_special_tokens": Values(False, (True, None), ("maybe",)),
    "spaces_between_special_tokens": Values(False, (True, None), ("maybe",)),
    "stop": Values(["e", "zz"], ("e", [], [""], list("abcde"), None), (7, [7])),
    "stop_token_ids": Values([75, 80], ([], [100_000], [-1], None), ("x", ["x"])),
    "stream": Values(True, (False, None, "on", 1, "off"), ("maybe", [1])),
    "stream_interval": _number(2, 1, 0, 1000, _HUGE),
    "stream_options": Values(
        {"include_usage": True},
        (
            {},
            {"include_usage": False},
            {"include_usage": True, "continuous_usage_stats": True},
            {"continuous_usage_stats": True},
            {"unheard_of": 1},
            None,
        ),
        ("x", [1]),
        {"stream": True},
    ),
    "structured_outputs": Values(
        {"choice": ["yes", "no"]},
        (
            {"regex": "[a-c]{2,4}"},
            {"json": _SCHEMA},
            {"grammar": 'root ::= "a" | "b"'},
            {"choice": []},
            {"choice": ["a"], "regex": "a"},
            {},
            None,
        ),
        ("x", [1]),
    ),
    "suffix": _text("end", ""),
    "temperature": _number(0.8, 0, 1, 2, 1e-9, -1, 1e9),
    "thinking_token_budget": _number(4, 0, -1, -2),
    "tool_choice": Values(
        "auto",
        (
            "none",
            "required",
            {"type": "function", "function": {"name": "look"}},
            {"type": "function", "function": {"name": "none-such"}},
            None,
        ),
        (7, "x"),
        {"tools": [TOOL]},
    ),
    "tools": Values([TOOL], ([], [TOOL, TOOL], None), ("x", [7])),
    "top_k": _number(5, 0, -1, -2, 100_000),
    "top_logprobs": Values(2, (0, -1, -2, 20, 21, None), ("x", [1]), {"logprobs": True}),
    "top_p": _number(0.8, 1, 0, 1e-9, 1.5),
    "truncate_prompt_tokens": _number(20, -1, 0, 1, 100_000, _HUGE),
    "truncation_side": Values(
        "left", ("right", None), (7, "middle"), {"truncate_prompt_tokens": 20}
    ),
    "use_beam_search": _flag(n=2, temperature=0),
    "user": _text("someone", ""),
    "vllm_xargs": Values({"a": 1, "b": "c", "d": [0.5]}, ({}, None), ("x", {"a": {}})),
    "watermarking": _flag(),
}
_OF_ROUTE: Final[Mapping[str, Mapping[str, Values]]] = {
    COMPLETIONS: {
        "logprobs": _number(2, 0, 1, -1, 20, 21, 2.0),
        "logprob_token_ids": Values([75, 76], ([], [100_000], None), ("x", ["x"]), {"logprobs": 1}),
        "prompt": Values("a prompt", ("", ["one"], [5, 6, 7], [[5, 6]], []), (7, [{}], {"a": 1})),
    },
    CHAT: {
        "logprobs": _flag(),
        "logprob_token_ids": Values(
            [75, 76], ([], [100_000], None), ("x", ["x"]), {"logprobs": True}
        ),
        "return_tokens_as_token_ids": _flag(logprobs=True),
        "messages": Values(
            [{"role": "user", "content": "a chat"}],
            (
                [],
                [{"role": "user", "content": ""}],
                [{"role": "user", "content": [{"type": "text", "text": "part"}]}],
                [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
                [{"role": "none-such", "content": "x"}],
                [{"role": "user"}],
            ),
            ("x", [7], {"role": "user"}),
        ),
    },
}


def members_of(document: Mapping[str, Any], route: str) -> dict[str, Values]:
    """Returns the members of a route's body, with their values."""
    operation = document["paths"][route]["post"]
    content = operation["requestBody"]["content"]["application/json"]["schema"]
    properties = _resolved(document, content)["properties"]
    return {
        name: _OF_ROUTE[route].get(name) or _KNOWN.get(name) or _by_schema(document, schema)
        for name, schema in properties.items()
    }


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _by_schema(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Values:
    """Returns values for a member that this file does not know."""
    kinds = [_resolved(document, each) for each in _alternatives(schema)]
    kind = next((each for each in kinds if each.get("type") != "null"), {})
    default = schema.get("default", kind.get("default"))
    edge = (None,)
    match kind.get("type"):
        case "boolean":
            return _flag()
        case "integer" | "number":
            bounds = [kind[name] for name in ("minimum", "maximum") if name in kind]
            least, most = kind.get("minimum", 1), kind.get("maximum", 1)
            return _number(default or max(least, min(most, 1)), *bounds)
        case "string":
            words = kind.get("enum") or [kind.get("const") or default or "a"]
            return _text(words[0], words[-1], "")
        case "array":
            return Values([], edge, ("x", 7))
        case _:
            return Values({}, edge, ("x", [1]))


def _alternatives(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            yield from schema[name]
            return
    yield schema
