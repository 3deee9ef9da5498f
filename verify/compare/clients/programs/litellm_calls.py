"""litellm, with its provider hosted_vllm: chats and completions, streamed and not, with a tool."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import session

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
import litellm


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": session.text(number)}]


def usage_of(answer: Any) -> list[int]:
    usage = answer.usage
    return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]


def ask(url: str, _model: str) -> None:
    asked: dict[str, Any] = {
        "model": "hosted_vllm/tiny",
        "api_base": url + "/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 12,
        "num_retries": 0,
    }
    found: dict[str, Any] = {}
    answer = litellm.completion(**asked, messages=said(1))
    found["chat"] = [answer.choices[0].message.content, usage_of(answer)]
    options = {"include_usage": True}
    streamed = litellm.completion(**asked, messages=said(2), stream=True, stream_options=options)
    chunks = list(streamed)
    whole = litellm.stream_chunk_builder(chunks)
    found["chat streamed"] = [whole.choices[0].message.content, usage_of(whole)]
    tool = {"type": "function", "function": session.WEATHER}
    named = {"type": "function", "function": {"name": "weather"}}
    more = {**asked, "max_tokens": 90, "tools": [tool], "tool_choice": named}
    called = litellm.completion(**more, messages=said(3)).choices[0].message.tool_calls
    found["a tool"] = [[call.function.name, call.function.arguments] for call in called]

    async def several() -> list[Any]:
        return await asyncio.gather(
            *(litellm.acompletion(**asked, messages=said(number)) for number in range(4, 12))
        )

    found["at once"] = [each.choices[0].message.content for each in asyncio.run(several())]
    text = {**asked, "model": "text-completion-openai/tiny"}
    answer = litellm.text_completion(**text, prompt=session.text(12))
    found["completion"] = answer.choices[0].text
    parts = litellm.text_completion(**text, prompt=session.text(13), stream=True)
    found["completion streamed"] = "".join(part.choices[0].text or "" for part in parts)
    try:
        litellm.completion(**{**asked, "temperature": -1}, messages=said(14))
    except litellm.BadRequestError as error:
        found["a wrong value"] = error.status_code
    session.tell(
        "litellm", "chats and completions, streamed and not, at once; a tool; an error", found
    )


session.run(ask)
