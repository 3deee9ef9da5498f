"""langchain-openai: chats and completions, streamed, in batches, with tools and structured."""

from __future__ import annotations

from typing import Any, Literal

import session
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]


def ask(url: str, _model: str) -> None:
    common: dict[str, Any] = {
        "model": "tiny",
        "base_url": url + "/v1",
        "api_key": SecretStr("none"),
        "temperature": 0,
        "max_tokens": 12,
        "max_retries": 0,
    }
    chat, found = ChatOpenAI(**common), {}
    answer = chat.invoke(session.text(1))
    found["chat"] = [answer.content, answer.usage_metadata]
    found["chat streamed"] = "".join(str(part.content) for part in chat.stream(session.text(2)))
    several = [session.text(number) for number in range(3, 9)]
    found["a batch"] = [each.content for each in chat.batch(several)]
    longer = ChatOpenAI(**{**common, "max_tokens": 60})
    structured = longer.with_structured_output(Weather, method="json_schema")
    parsed = structured.invoke(session.text(10))
    assert isinstance(parsed, Weather)
    found["structured"] = parsed.city
    by_tool = longer.bind_tools([Weather], tool_choice="Weather").invoke(session.text(11))
    found["a tool"] = [[call["name"], call["args"]] for call in by_tool.tool_calls]

    completion = OpenAI(**common)
    found["completion"] = completion.invoke(session.text(12))
    found["completion streamed"] = "".join(completion.stream(session.text(13)))
    # All prompts are in one body.
    generated = completion.generate([session.text(number) for number in range(14, 18)])
    found["completions"] = [[one.text for one in each] for each in generated.generations]
    found["their usage"] = (generated.llm_output or {}).get("token_usage")
    session.tell(
        "langchain-openai",
        "chats and completions: one, streamed, in a batch; a tool; structured",
        found,
    )


session.run(ask)
