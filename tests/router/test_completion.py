"""Answers that are put together from the chunks of a stream, as vLLM sends them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from kvxfer.router.completion import collect


async def put_together(*choices: dict[str, Any], kind: str = "text_completion") -> dict[str, Any]:
    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        for choice in choices:
            yield {"object": kind, "choices": [{"index": 0, **choice}], "usage": None}
        yield {"object": kind, "choices": [], "usage": {"total_tokens": 7}}

    return await collect(chunks())


async def test_what_an_engine_leaves_empty_stays_empty() -> None:
    whole = await put_together(
        {"text": "a", "token_ids": None, "logprobs": None, "finish_reason": None},
        {"text": "b", "token_ids": None, "logprobs": None, "finish_reason": "stop"},
    )
    assert whole["usage"] == {"total_tokens": 7}
    assert whole["choices"] == [
        {"index": 0, "text": "ab", "token_ids": None, "logprobs": None, "finish_reason": "stop"}
    ]


async def test_logprobs_are_those_of_all_tokens() -> None:
    whole = await put_together(
        {
            "text": "a",
            "prompt_token_ids": [5, 6],
            "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "text_offset": [0]},
        },
        {
            "text": "b",
            "prompt_token_ids": None,
            "logprobs": {"tokens": ["b"], "token_logprobs": [-1.5], "text_offset": [1]},
        },
    )
    [choice] = whole["choices"]
    assert choice["prompt_token_ids"] == [5, 6]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -1.5],
        "text_offset": [0, 1],
    }


async def test_a_message_is_the_sum_of_its_deltas() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": function}]}

    named = {"index": 0, "id": "call-0", "type": "function", "function": {"name": "f"}}
    whole = await put_together(
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"reasoning_content": "hm"}},
        {"delta": {"reasoning_content": "m"}},
        {"delta": {"content": "so"}},
        {"delta": {"tool_calls": [named]}},
        {"delta": call(0, arguments='{"x":')},
        {"delta": call(1, name="g", arguments="{}")},
        {"delta": call(0, arguments=" 1}"), "finish_reason": "tool_calls"},
        kind="chat.completion.chunk",
    )
    assert whole["object"] == "chat.completion"
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hmm",
        "tool_calls": [
            {
                "id": "call-0",
                "type": "function",
                "function": {"name": "f", "arguments": '{"x": 1}'},
            },
            {"function": {"name": "g", "arguments": "{}"}},
        ],
    }
