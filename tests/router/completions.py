"""Requests of a client to a real cluster, and the events of its answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import httpx2

from kvxfer.event_stream import EventParser

MODEL: Final = "tiny-llama"


def asked(prompt: str | Sequence[int], max_tokens: int = 24, **fields: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return {**fields, "prompt": prompt}


def tokens_of(answer: httpx2.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


class Stream:
    """The events of an answer, as they arrive."""

    def __init__(self, answer: httpx2.Response) -> None:
        self._bytes = answer.aiter_bytes()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yields each event, and None for [DONE]."""
        parser = EventParser()
        async for part in self._bytes:
            for event in parser.feed(part):
                yield None if event.data == "[DONE]" else json.loads(event.data)


@contextlib.asynccontextmanager
async def streamed(client: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncIterator[Any]:
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        yield aiter(Stream(answer))
