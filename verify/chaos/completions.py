"""One request to the router, and its outcome."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2

from kvxfer.event_stream import EventParser

_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    expected: list[int]
    """The tokens that one aggregated process answers."""


class Sent(Protocol):
    streamed: bool
    tokens: list[int]
    """The tokens that have arrived, even if the request failed later."""
    failure: str | None


async def complete(
    http: httpx2.AsyncClient, sent: Sent, body: Mapping[str, Any], request_id: str = ""
) -> None:
    """Fills in `sent`. Raises an error of httpx2 if there is no answer."""
    headers = {"X-Request-ID": request_id} if request_id else {}
    body = {**body, "ignore_eos": True, "stream": sent.streamed}
    parser, done = EventParser(), False
    async with http.stream("POST", _PATH, json=body, headers=headers) as answer:
        if not answer.is_success or not sent.streamed:
            told = json.loads(await answer.aread())
            if answer.is_success:
                sent.tokens = told["choices"][0]["token_ids"]
            else:
                sent.failure = f"HTTP {answer.status_code}: {told['error']['message']}"
            return
        async for content in answer.aiter_bytes():
            for event in parser.feed(content):
                if event.data == "[DONE]":
                    done = True
                    continue
                chunk = json.loads(event.data)
                if "error" in chunk:
                    sent.failure = str(chunk["error"]["message"])
                for choice in chunk.get("choices", ()):
                    sent.tokens += choice.get("token_ids") or []
    if not done and sent.failure is None:
        sent.failure = "the stream ended without [DONE]"
