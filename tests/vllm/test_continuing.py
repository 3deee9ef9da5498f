"""Streams of the real vLLM that continue at another server: text, stop strings and usage."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from tokenizers import Tokenizer

from kvxfer.event_stream import EventParser
from verify.polling import wait_until
from verify.processes.fleet import Fleet
from verify.processes.vllm.servers import add_vllm, make_model

pytestmark = [pytest.mark.realtime, pytest.mark.timeout(900)]

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
TOKENS: Final = 400
STREAMS: Final = 16
# Each stream has this many events when a server is killed; an event of some has seven tokens.
BEGUN: Final = 12

Event = dict[str, Any]


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model for which a token is a byte."""
    return make_model(folder / "bytes", "--tokenizer", "bytes")


@pytest.fixture
def fleet(model: Path) -> Iterator[Fleet]:
    """Two servers that each serve alone, as there is no prefill worker."""
    with Fleet() as fleet:
        fleet.start_control_plane("--lease-seconds", "300")
        fleet.start_router("--continue-streams", "--first-token-seconds", "300")
        for name in ("first", "second"):
            add_vllm(fleet, name, model, role="kv_consumer", peer_timeout=60, lease_seconds=300)
        for server in fleet.workers.values():
            server.serves("/health")
        wait_until(fleet.whole)
        yield fleet


def body_of(number: int, allowed: list[int]) -> tuple[str, Event]:
    """Returns the route of a stream, and its body without a stop string."""
    asked: Event = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    asked |= {"allowed_token_ids": allowed, "repetition_penalty": 1.3}
    if number % 4 > 1:
        asked["stream_interval"] = 7
    if number % 2:
        said = [{"role": "user", "content": f"Stream {number}"}]
        return CHAT, {**asked, "messages": said}
    return COMPLETIONS, {**asked, "prompt": f"Stream {number} €"}


async def stream(url: str, path: str, body: Event, begun: set[str]) -> list[Event]:
    parser = EventParser()
    events: list[str] = []
    async with (
        httpx2.AsyncClient(base_url=url, timeout=None) as client,
        client.stream("POST", path, json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for part in answer.aiter_bytes():
            events += [event.data for event in parser.feed(part)]
            if len(events) > BEGUN:
                begun.add(json.loads(events[0])["id"])
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event) for event in events[:-1]]


def said_by(events: list[Event]) -> tuple[str, list[Any], Any, Any]:
    """Returns the text, the finish reasons, the usage, and the members of choices that are not
    null."""
    text, ends, seen = "", [], set()
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice.get("delta")
        text += choice["text"] if delta is None else delta.get("content") or ""
        seen |= {name for name, value in choice.items() if value is not None}
        if choice["finish_reason"]:
            ends.append((choice["finish_reason"], choice["stop_reason"]))
    return text, ends, events[-1]["usage"], seen


async def test_continued_streams_equal_those_of_one_server(
    fleet: Fleet, model: Path, rng: random.Random
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # Many events end in the middle of a character.
    bodies = [body_of(number, tokenizer.encode("a bé€🙂").ids) for number in range(STREAMS)]
    alone = fleet.running["second"].url
    whole = await asyncio.gather(*(stream(alone, *each, set()) for each in bodies))
    for number, (_, body) in enumerate(bodies):
        if number % 8 > 3:  # a stop string that comes late
            text = said_by(whole[number])[0]
            places = range(len(text) // 4, len(text) - 12)
            late = [at for at in places if text.index(text[at : at + 9]) == at]
            at = rng.choice(late)
            body["stop"] = [text[at : at + 9], "nowhere to be found"]
    again = await asyncio.gather(*(stream(alone, *each, set()) for each in bodies))
    expected = [said_by(events) for events in again]
    begun: set[str] = set()
    url = fleet.router.url
    streams = [asyncio.create_task(stream(url, path, body, begun)) for path, body in bodies]
    await asyncio.to_thread(wait_until, lambda: len(begun) == STREAMS, 60)
    fleet.kill("first")
    answers = await asyncio.gather(*streams)
    metrics = httpx2.get(f"{url}/metrics").text
    [went_on] = [
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("kvxfer_router_continued_streams_total")
    ]
    assert went_on >= 4, "it was killed too late"
    for (path, body), events, told in zip(bodies, answers, expected, strict=True):
        assert said_by(events) == told, (path, body)
        assert len({(event["id"], event["object"], event["created"]) for event in events}) == 1
