"""The openai package, one request after the other."""

from __future__ import annotations

from typing import Any, Literal

import session
from openai import APIStatusError, OpenAI
from pydantic import BaseModel

# These fields differ between two servers.
OF_SERVER = {"id", "created", "system_fingerprint"}


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]


def said(number: int) -> list[Any]:
    return [{"role": "user", "content": session.text(number)}]


def ask(url: str, _model: str) -> None:
    client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    found: dict[str, Any] = {"models": [model.id for model in client.models.list()]}

    completion = client.completions.create(**asked, prompt=session.text(1), logprobs=2)
    found["completion"] = completion.model_dump(exclude=OF_SERVER)
    usage = {"include_usage": True}
    streamed = client.completions.create(
        **asked, prompt=session.text(2), stream=True, stream_options=usage
    )
    chunks = list(streamed)
    found["completion streamed"] = [
        "".join(choice.text for chunk in chunks for choice in chunk.choices),
        chunks[-1].usage and chunks[-1].usage.model_dump(),
    ]

    chat = client.chat.completions
    answer = chat.create(**asked, messages=said(3), logprobs=True, top_logprobs=2)
    found["chat"] = answer.model_dump(exclude=OF_SERVER)
    with chat.stream(**asked, messages=said(4), stream_options=usage) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.current_completion_snapshot
    found["chat by the streaming helper"] = [deltas, final.model_dump(exclude=OF_SERVER)]

    tools: dict[str, Any] = {"tools": [{"type": "function", "function": session.WEATHER}]}
    tools["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    found["a tool"] = calls_of(
        chat.create(**{**asked, "max_tokens": 400}, **tools, messages=said(5))
    )
    with chat.stream(**{**asked, "max_tokens": 400}, **tools, messages=said(6)) as stream:
        arguments = "".join(
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        )
        final = calls_of(stream.get_final_completion())
    found["a tool by the streaming helper"] = [arguments, final]
    parsed = chat.parse(**{**asked, "max_tokens": 400}, messages=said(7), response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    found["structured"] = parsed.choices[0].message.parsed.city

    responses = client.responses
    limits: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    response = responses.create(**limits, input=session.text(8))
    found["response"] = [response.output_text, response.usage and response.usage.model_dump()]
    with responses.stream(**limits, input=session.text(9)) as events:
        deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        found["response streamed"] = [deltas, events.get_final_response().output_text]

    refused: tuple[tuple[str, Any], ...] = (
        ("a prompt that is too long", {**asked, "prompt": session.text(10, 3000)}),
        ("no such model", {**asked, "model": "none-such", "prompt": "a"}),
        ("a wrong value", {**asked, "prompt": "a", "temperature": -1}),
    )
    for name, body in refused:
        try:
            client.completions.create(**body)
        except APIStatusError as error:
            found[name] = [type(error).__name__, error.status_code, error.message]
    session.tell(
        "openai",
        "completions, chats, tools, structured answers, responses, errors; streamed and not",
        found,
    )


def calls_of(answer: Any) -> list[list[str]]:
    [choice] = answer.choices
    called = [call.function for call in choice.message.tool_calls]
    return [[choice.finish_reason], *([each.name, each.arguments] for each in called)]


session.run(ask)
