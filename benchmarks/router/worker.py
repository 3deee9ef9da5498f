"""A worker without a model: answers /v1/completions and /tokenize in vLLM's form.

The first token of a stream comes at once. From then on all streams get a token at each step, as
from an engine that computes its requests in one batch. Each event is written separately.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from benchmarks.router.asgi import begin, body_of, end, part, serve
from benchmarks.router.requests import PROMPT_TOKENS

_JSON: Final = b"application/json"
_EVENTS: Final = b"text/event-stream; charset=utf-8"
_TEXT: Final = " token"


class _Options(msgspec.Struct):
    include_usage: bool = False


class _Asked(msgspec.Struct):
    model: str = ""
    max_tokens: int = 16
    stream: bool = False
    stream_options: _Options = msgspec.field(default_factory=_Options)


class Worker:
    """The ASGI application, for prefill and decode alike."""

    def __init__(self, rate: float) -> None:
        """Makes a worker. `rate` is the tokens per second of each stream."""
        self._step_seconds = 1 / rate
        self._tokens = msgspec.json.encode({"tokens": list(range(PROMPT_TOKENS))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        if scope["path"] != "/v1/completions":
            await begin(send, 200, _JSON)
            await end(send, self._tokens if scope["path"] == "/tokenize" else b"{}")
            return
        asked = msgspec.json.decode(body, type=_Asked)
        if asked.stream:
            await self._stream(asked, send)
        else:
            await begin(send, 200, _JSON)
            await end(send, msgspec.json.encode(_answer(asked)))

    async def _stream(self, asked: _Asked, send: Send) -> None:
        event, last = (_event(_chunk(asked, finished)) for finished in (False, True))
        clock, step = asyncio.get_running_loop().time, self._step_seconds
        await begin(send, 200, _EVENTS)
        due = math.ceil(clock() / step) * step
        for left in reversed(range(asked.max_tokens)):
            await part(send, event if left else last)
            if left:
                due += step
                await asyncio.sleep(due - clock())
        if asked.stream_options.include_usage:
            await part(send, _event({**_head(asked), "choices": [], "usage": _usage(asked)}))
        await part(send, b"data: [DONE]\n\n")
        await end(send)


def _head(asked: _Asked) -> dict[str, object]:
    return {
        "id": "cmpl-0af7651916cd43dd8448eb211c80319c",
        "object": "text_completion",
        "created": 1_795_046_400,
        "model": asked.model,
    }


def _chunk(asked: _Asked, finished: bool) -> dict[str, object]:
    choice = {
        "index": 0,
        "text": _TEXT,
        "logprobs": None,
        "finish_reason": "length" if finished else None,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    return {**_head(asked), "choices": [choice]}


def _answer(asked: _Asked) -> dict[str, object]:
    return {**_chunk(asked, finished=True), "usage": _usage(asked)}


def _usage(asked: _Asked) -> dict[str, int]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "total_tokens": PROMPT_TOKENS + asked.max_tokens,
        "completion_tokens": asked.max_tokens,
    }


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, required=True)
    serve(Worker(parser.parse_args().rate))


if __name__ == "__main__":
    main()
