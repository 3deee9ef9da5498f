"""Requests as users send them, written by hand. Most are sent streamed and in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from verify.compare.openai.cases import PROMPT, Body, Case, Texts, base
from verify.compare.openai.members import CHAT, COMPLETIONS, TOOL

RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"

_WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}
_NAMED: Final = {"type": "function", "function": {"name": "weather"}}
_PIXEL: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWj"
    "R9awAAAABJRU5ErkJggg=="
)
_CALL: Final = (
    '<tool_call>\\n\\{"name": "weather", "arguments": \\{"city": "(Rome|Oslo)"\\}\\}\\n</tool_call>'
)


def _completions(texts: Texts) -> Iterator[tuple[str, Body]]:
    def text(words: int = 40) -> str:
        return texts.text(words)

    ids = [texts.text(3).encode() for _ in range(4)]
    tokens = [[byte + 3 for byte in each] for each in ids]
    yield "token ids", {"prompt": tokens[0]}
    yield "one text in a list", {"prompt": [text()]}
    yield "one list of token ids in a list", {"prompt": [tokens[1]]}
    yield "three texts", {"prompt": [text(), text(5), text(60)]}
    yield "two lists of token ids", {"prompt": tokens[2:]}
    yield "three texts, two samples", {"prompt": [text(), text()], "n": 2, "temperature": 1.0}
    yield "a long prompt", {"prompt": text(200)}
    yield "a prompt that is too long", {"prompt": text(400)}
    yield "too many tokens", {"prompt": text(), "max_tokens": 4000}
    yield "one token", {"prompt": text(), "max_tokens": 1}
    yield "a prompt of one token", {"prompt": [75], "max_tokens": 4}
    yield "no model", {"model": None, "prompt": text()}
    yield "greedy by temperature 0", {"prompt": text(), "temperature": 0.0, "top_k": 1}
    for seed in (1, 2, 3):
        yield f"seed {seed} at 1", {"prompt": text(), "temperature": 1.0, "seed": seed}
    yield "seed, top_p, top_k, min_p", {
        "prompt": text(), "temperature": 1.2, "top_p": 0.7, "top_k": 9, "min_p": 0.02, "seed": 4
    }  # fmt: skip
    yield "three samples", {"prompt": text(), "n": 3, "temperature": 1.0, "max_tokens": 9}
    yield "best_of", {"prompt": text(), "best_of": 2, "temperature": 1.0}
    yield "beam search", {"prompt": text(), "use_beam_search": True, "n": 2}
    yield "beams and length_penalty", {
        "prompt": text(), "use_beam_search": True, "n": 3, "length_penalty": 0.5
    }  # fmt: skip
    for count in (0, 1, 5):
        yield f"logprobs {count}", {"prompt": text(), "logprobs": count}
    yield "logprobs of two samples", {"prompt": text(), "logprobs": 2, "n": 2, "temperature": 1.0}
    yield "logprobs as token ids", {
        "prompt": text(), "logprobs": 1, "return_tokens_as_token_ids": True
    }  # fmt: skip
    yield "token ids of both", {"prompt": text(), "return_token_ids": True}
    yield "echo", {"prompt": text(), "echo": True}
    yield "echo of token ids", {"prompt": tokens[0], "echo": True, "return_token_ids": True}
    yield "echo with logprobs", {"prompt": text(), "echo": True, "logprobs": 2}
    yield "log likelihood", {"prompt": text(), "echo": True, "logprobs": 1, "max_tokens": 0}
    yield "log likelihoods", {
        "prompt": [text(), text(8)], "echo": True, "logprobs": 1, "max_tokens": 0
    }  # fmt: skip
    yield "log likelihood and a token", {
        "prompt": tokens[1], "echo": True, "logprobs": 1, "max_tokens": 1
    }  # fmt: skip
    for count in (0, 1, 3):
        yield f"prompt_logprobs {count}", {"prompt": text(), "prompt_logprobs": count}
    yield "prompt_logprobs of two samples", {
        "prompt": text(), "prompt_logprobs": 1, "n": 2, "temperature": 1.0
    }  # fmt: skip
    yield "prompt_logprobs of a long prompt", {"prompt": text(120), "prompt_logprobs": 0}
    yield "logprobs of both", {"prompt": text(), "prompt_logprobs": 1, "logprobs": 1}
    yield "a stop word", {"prompt": text(), "stop": "e", "max_tokens": 60}
    yield "stop words, one of them kept", {
        "prompt": text(), "stop": ["e", "a"], "include_stop_str_in_output": True, "max_tokens": 60
    }  # fmt: skip
    yield "a stop token", {"prompt": text(), "stop_token_ids": [72, 100], "max_tokens": 60}
    yield "at least ten", {"prompt": text(), "min_tokens": 10, "stop": "e", "max_tokens": 30}
    yield "a minimum above the maximum", {"prompt": text(), "min_tokens": 10}
    yield "truncated", {"prompt": text(100), "truncate_prompt_tokens": 50}
    yield "truncated at the right", {
        "prompt": text(100), "truncate_prompt_tokens": 50, "truncation_side": "right"
    }  # fmt: skip
    yield "one of three", {"prompt": text(), "structured_outputs": {"choice": ["a", "bb", "ccc"]}}
    yield "a regular expression", {
        "prompt": text(), "structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}, "max_tokens": 20
    }  # fmt: skip
    yield (
        "JSON by a schema",
        {
            "prompt": text(),
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}},
                },
            },
        },
    )
    yield "any JSON object", {
        "prompt": text(), "response_format": {"type": "json_object"}, "max_tokens": 30
    }  # fmt: skip
    yield "a bad regular expression", {"prompt": text(), "structured_outputs": {"regex": "("}}
    yield "biased", {"prompt": text(), "logit_bias": {"75": 100}}
    yield "biased beyond the vocabulary", {"prompt": text(), "logit_bias": {"99999": 1}}
    yield "allowed tokens", {"prompt": text(), "allowed_token_ids": [70, 71, 72]}
    yield "allowed tokens beyond the vocabulary", {"prompt": text(), "allowed_token_ids": [99999]}
    yield "penalties", {
        "prompt": text(), "frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.3
    }  # fmt: skip
    yield "embeddings", {"prompt": None, "prompt_embeds": "AAAA"}
    yield "no prompt", {"prompt": None}
    yield "an empty prompt", {"prompt": ""}
    yield "a suffix", {"prompt": text(), "suffix": "x"}
    yield "unheard-of members", {"prompt": text(), "unheard_of": {"a": [1]}, "extra_body": {}}
    yield "a prompt of another script", {"prompt": "天地玄黃 宇宙洪荒 \u0000\ufffd 🙂" + text()}
    yield "not finite", {"prompt": text(), "temperature": float("nan")}
    yield "tokens beyond the vocabulary", {"prompt": [100_000]}
    yield "negative tokens", {"prompt": [-1]}


def _chats(texts: Texts) -> Iterator[tuple[str, Body]]:
    def said(*more: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": texts.text()}, *more]

    answered = {"role": "assistant", "content": "yes"}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    yield "a chat", {"messages": said()}
    yield "a system message", {
        "messages": [{"role": "system", "content": texts.text()}, *said()]
    }  # fmt: skip
    yield "turns", {"messages": said(answered, *said())}
    yield "the model continues a message", {
        "messages": said(answered), "continue_final_message": True, "add_generation_prompt": False
    }  # fmt: skip
    yield "parts", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": texts.text()}, {"type": "text", "text": "more"}
    ]}]}  # fmt: skip
    yield "an image", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": texts.text()},
        {"type": "image_url", "image_url": {"url": _PIXEL}},
    ]}]}  # fmt: skip
    yield "a name", {"messages": [{"role": "user", "name": "ann", "content": texts.text()}]}
    yield "max_completion_tokens", {
        "messages": said(), "max_tokens": None, "max_completion_tokens": 5
    }  # fmt: skip
    yield "both limits", {"messages": said(), "max_completion_tokens": 3}
    yield "no limit but the context", {
        "messages": said(), "max_tokens": None, "stop": ["e"], "min_tokens": 2
    }  # fmt: skip
    yield "no model", {"model": None, "messages": said()}
    yield "two samples", {"messages": said(), "n": 2, "temperature": 1.0}
    yield "beam search", {"messages": said(), "use_beam_search": True, "n": 2}
    yield "logprobs", {"messages": said(), "logprobs": True}
    yield "logprobs of three", {"messages": said(), "logprobs": True, "top_logprobs": 3}
    yield "prompt_logprobs", {"messages": said(), "prompt_logprobs": 1}
    yield "echo", {"messages": said(answered), "echo": True, "add_generation_prompt": False}
    yield "token ids and text of the prompt", {
        "messages": said(), "return_token_ids": True, "return_prompt_text": True
    }  # fmt: skip
    yield "a stop word", {"messages": said(), "stop": ["e"], "max_tokens": 60}
    yield "truncated", {"messages": said(), "truncate_prompt_tokens": 30}
    yield "a template of the client", {"messages": said(), "chat_template": "x"}
    yield "documents", {"messages": said(), "documents": [{"title": "t", "text": texts.text(4)}]}
    yield "tools, none called", {"messages": said(), "tools": [_WEATHER], "tool_choice": "none"}
    yield "tools, perhaps called", {"messages": said(), "tools": [_WEATHER]}
    yield "a tool that has to be called", {
        "messages": said(), "tools": [_WEATHER], "tool_choice": "required", "max_tokens": 90
    }  # fmt: skip
    yield "a tool by its name", {
        "messages": said(), "tools": [_WEATHER, TOOL], "tool_choice": _NAMED, "max_tokens": 60
    }  # fmt: skip
    yield "an unknown tool", {
        "messages": said(), "tools": [TOOL], "tool_choice": _NAMED
    }  # fmt: skip
    yield (
        "a tool call by a grammar",
        {
            "messages": said(),
            "tools": [_WEATHER],
            "structured_outputs": {"regex": _CALL},
            "max_tokens": 120,
        },
    )
    yield (
        "two tool calls by a grammar",
        {
            "messages": said(),
            "tools": [_WEATHER],
            "structured_outputs": {"regex": f"{_CALL}\n{_CALL}"},
            "max_tokens": 240,
        },
    )
    yield (
        "two tool calls, one permitted",
        {
            "messages": said(),
            "tools": [_WEATHER],
            "parallel_tool_calls": False,
            "structured_outputs": {"regex": f"{_CALL}\n{_CALL}"},
            "max_tokens": 240,
        },
    )
    yield "results of tools", {"messages": said(called, result), "tools": [_WEATHER]}
    yield (
        "reasoning by a grammar",
        {
            "messages": said(),
            "structured_outputs": {"regex": "<think>[a-c]{3}</think>[d-f]{4}"},
            "max_tokens": 40,
        },
    )
    yield (
        "reasoning that is left out",
        {
            "messages": said(),
            "include_reasoning": False,
            "structured_outputs": {"regex": "<think>[a-c]{3}</think>[d-f]{4}"},
            "max_tokens": 40,
        },
    )
    yield "little reasoning", {"messages": said(), "reasoning_effort": "low"}
    yield "no reasoning", {
        "messages": said(), "chat_template_kwargs": {"enable_thinking": False}
    }  # fmt: skip
    yield (
        "JSON by a schema",
        {
            "messages": said(),
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}},
                },
            },
        },
    )
    yield "no messages", {"messages": []}
    yield "invalid messages", {"messages": ["hi"]}
    yield "an unknown role", {"messages": [{"role": "wizard", "content": texts.text()}]}


def _responses(texts: Texts) -> Iterator[tuple[str, Body]]:
    asked: Body = {"model": "tiny", "temperature": 0, "max_output_tokens": 6}
    function = {"type": "function", **_WEATHER["function"]}  # type: ignore[dict-item]
    for name, more in (
        ("text", {"input": texts.text()}),
        ("instructions", {"input": texts.text(), "instructions": texts.text(5)}),
        ("messages", {"input": [{"role": "user", "content": texts.text()}]}),
        (
            "typed messages",
            {
                "input": [
                    {
                        "type": "message",
                        "role": "user",
                        "content": [{"type": "input_text", "text": texts.text()}],
                    }
                ]
            },
        ),
        ("a long input", {"input": texts.text(200)}),
        ("metadata", {"input": texts.text(), "metadata": {"a": "b"}, "user": "u"}),
        ("a function", {"input": texts.text(), "tools": [function]}),
        (
            "JSON",
            {
                "input": texts.text(),
                "max_output_tokens": 60,
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "s",
                        "schema": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}},
                    }
                },
            },
        ),
        ("stored", {"input": texts.text(), "store": True}),
        ("in the background", {"input": texts.text(), "background": True}),
        ("the response before", {"input": texts.text(), "previous_response_id": "resp_none"}),
        ("no tokens", {"input": texts.text(), "max_output_tokens": 0}),
        ("no input", {}),
        ("no such model", {"input": "a", "model": "none-such"}),
    ):
        yield name, {**asked, **more}


def _messages(texts: Texts) -> Iterator[tuple[str, Body]]:
    def said(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text}]

    asked: Body = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    tool = {"name": "weather", "input_schema": _WEATHER["function"]["parameters"]}  # type: ignore[index]
    for name, more in (
        ("text", {"messages": said(texts.text())}),
        ("system", {"messages": said(texts.text()), "system": texts.text(5)}),
        (
            "parts",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": texts.text()}]}]},
        ),
        ("a long message", {"messages": said(texts.text(200))}),
        ("stop sequences", {"messages": said(texts.text()), "stop_sequences": ["e"]}),
        ("a tool", {"messages": said(texts.text()), "tools": [tool]}),
        (
            "a tool that has to be called",
            {
                "messages": said(texts.text()),
                "tools": [tool],
                "tool_choice": {"type": "any"},
                "max_tokens": 90,
            },
        ),
        (
            "thinking",
            {
                "messages": said(texts.text()),
                "thinking": {"type": "enabled", "budget_tokens": 2},
            },
        ),
        ("no limit", {"messages": said(texts.text()), "max_tokens": None}),
        ("no tokens", {"messages": said(texts.text()), "max_tokens": 0}),
        ("no messages", {"messages": []}),
        ("no such model", {"messages": said("a"), "model": "none-such"}),
    ):
        yield name, {**asked, **more}
    for name in ("model", "max_tokens"):
        body = {**asked, "messages": said(texts.text())}
        del body[name]
        yield f"without {name}", body


_WRITTEN: Final = {
    COMPLETIONS: _completions,
    CHAT: _chats,
    RESPONSES: _responses,
    MESSAGES: _messages,
}
_UNREADABLE: Final = (b"", b"{", b"[1]", b"7", b"null", b"\xff", b'{"model": "tiny",}', b"{}")


def by_hand(texts: Texts) -> Iterator[Case]:
    """Yields all requests."""
    for route, written in _WRITTEN.items():
        for streamed in (False, True):
            for name, more in written(texts):
                before = base(route, texts) if route in PROMPT else {}
                body = {**before, **more, **({"stream": True} if streamed else {})}
                yield Case(f"{name}{' streamed' if streamed else ''}", route, (body,))
    for route in (COMPLETIONS, CHAT, RESPONSES, MESSAGES):
        for content in _UNREADABLE:
            yield Case(f"{content!r}", route, (content,))
        text = b'{"model": "tiny", "prompt": "a", "messages": []}'
        yield Case("not JSON", route, (text,), headers={"Content-Type": "text/plain"})
    for route in (COMPLETIONS, CHAT):
        again = {**base(route, texts), PROMPT[route]: texts.prompt(route, 120)}
        stream: Body = {"stream": True, "stream_options": {"include_usage": True}}
        yield Case("the same again", route, (again, again))
        again = {**base(route, texts), PROMPT[route]: texts.prompt(route, 120), **stream}
        yield Case("the same again streamed", route, (again, again))
    yield from _others(texts)


def _others(texts: Texts) -> Iterator[Case]:
    """Yields requests of routes that transfer no KV cache."""
    text = texts.text()
    chat = [{"role": "user", "content": text}]
    for route, body in (
        ("/tokenize", {"model": "tiny", "prompt": text}),
        ("/tokenize", {"model": "tiny", "messages": chat}),
        ("/tokenize", {"model": "none-such", "prompt": text}),
        ("/tokenize", {"model": "tiny"}),
        ("/detokenize", {"model": "tiny", "tokens": [70, 71, 72]}),
        ("/detokenize", {"model": "tiny", "tokens": ["x"]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": chat}),
        ("/v1/embeddings", {"model": "tiny", "input": text}),
        ("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b"]}),
        ("/v1/score", {"model": "tiny", "text_1": "a", "text_2": "b"}),
        (
            "/v1/chat/completions/batch",
            {"model": "tiny", "messages": [chat, chat], "max_tokens": 4, "temperature": 0},
        ),
        ("/v1/responses/resp_none/cancel", {}),
    ):
        yield Case(route, route, (body,))
    for route in ("/version", "/v1/models", "/v1/responses/resp_none"):
        yield Case(route, route, (b"",), method="GET")
