"""Answers of a server and rows of the table, for the tests of the comparison."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx2

from verify.compare.openai.answers import read
from verify.compare.openai.excuses import Excuse
from verify.compare.openai.members import COMPLETIONS

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USAGE: Final = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}
DONE: Final = "[DONE]"
ERROR: Final = {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}
REFUSED: Final = Excuse("all", "kv_transfer_params", "not null", "all")
OF_USAGE: Final = Excuse(COMPLETIONS, "n", "over 1", "usage")


def whole(content: Any, status: int = 200, **headers: str) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, json=content, headers=named)


def streamed(*events: Any, cut: int = 0) -> httpx2.Response:
    """Returns a stream without the last `cut` bytes. An event with a type is a pair with its
    data."""
    lines = []
    for each in events:
        name, data = each if isinstance(each, tuple) else ("", each)
        text = data if isinstance(data, str) else json.dumps(data)
        lines.append((f"event: {name}\n" if name else "") + f"data: {text}\n\n")
    content = "".join(lines).encode()
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return httpx2.Response(200, content=content[: len(content) - cut], headers=headers)


def found(ours: httpx2.Response, theirs: httpx2.Response) -> list[str]:
    return [str(where) for where in read(ours).differences(read(theirs))]


def paths(ours: httpx2.Response, theirs: httpx2.Response) -> set[str]:
    """Returns the paths of all differences, but not those of the list of a stream's member
    names."""
    where = [each.path for each in read(ours).differences(read(theirs))]
    return {".".join(path) for path in where if path[:1] != ("members",)}


def event(*choices: Any, **more: Any) -> dict[str, Any]:
    said = {"id": "cmpl-5a1f", "object": "text_completion", "created": 17, "model": "tiny"}
    return {**said, "choices": list(choices), **more}


def piece(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}


def delta(index: int = 0, finish_reason: str | None = None, **said: Any) -> dict[str, Any]:
    return event({"index": index, "delta": said, "finish_reason": finish_reason})


def likely(**tokens: float) -> dict[str, Any]:
    return {
        "tokens": list(tokens),
        "token_logprobs": list(tokens.values()),
        "top_logprobs": [{token: logprob} for token, logprob in tokens.items()],
    }
