"""The anthropic package: messages, streamed and not, and tools."""

from __future__ import annotations

from typing import Any

import session
from anthropic import Anthropic, APIStatusError


def said(number: int) -> list[Any]:
    return [{"role": "user", "content": session.text(number)}]


def ask(url: str, _model: str) -> None:
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12}
    asked["extra_body"] = {"temperature": 0}  # the package has no argument for it any more
    found: dict[str, Any] = {}
    answer = client.messages.create(**asked, messages=said(1))
    found["message"] = answer.model_dump(exclude={"id"})
    with client.messages.stream(**asked, messages=said(2), system="brief") as stream:
        deltas = "".join(stream.text_stream)
        final = stream.get_final_message()
    found["message streamed"] = [deltas, final.model_dump(exclude={"id"})]
    schema = session.WEATHER["parameters"]
    answer = client.messages.create(
        **{**asked, "max_tokens": 90},
        messages=said(3),
        tools=[{"name": "weather", "input_schema": schema, "strict": True}],
        tool_choice={"type": "tool", "name": "weather"},
    )
    calls = [part for part in answer.content if part.type == "tool_use"]
    found["a tool"] = [[call.name, call.input] for call in calls]
    found["tokens"] = client.messages.count_tokens(model="tiny", messages=said(4)).input_tokens
    try:
        client.messages.create(**asked, messages=[])
    except APIStatusError as error:
        found["no messages"] = [type(error).__name__, error.status_code]
    session.tell("anthropic", "messages, streamed and not; a tool; tokens counted; an error", found)


session.run(ask)
