"""`kvxfer router --continue-streams` over real workers: a decode worker is killed mid-stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvxfer.event_stream import EventParser, ServerSentEvent
from kvxfer.reference.runner import ModelRunner
from verify.processes.fleet import Fleet

from .cluster import until
from .completions import MODEL

pytestmark = pytest.mark.realtime

STREAMS = 100
TOKENS = 200
BLOCKS = 2048
CHAT = "/v1/chat/completions"


@pytest.fixture
def fleet(model: Path) -> Iterator[Fleet]:
    """A fleet with one pair."""
    with Fleet() as fleet:
        # A frozen worker keeps its lease, and on a busy machine no peer is lost.
        fleet.start_control_plane("--lease-seconds", "120")
        fleet.start_router("--continue-streams", "--first-token-seconds", "120")
        start(fleet, model, "prefill-0", "decode-0")
        yield fleet


def start(fleet: Fleet, model: Path, *names: str) -> None:
    options = ("--model", model, "--blocks", str(BLOCKS), "--threads", "1", "--peer-timeout", "60")
    for worker in [fleet.begin_worker(name, *options) for name in names]:
        worker.ready()


def body_of(number: int) -> tuple[str, str, dict[str, Any]]:
    """Returns route, prompt and body of a request. Every second one is a chat; ten differ."""
    said = f"Stream {number % 10} " + "goes on " * (number % 5)
    common = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    common |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    if number % 2:
        messages = [{"role": "user", "content": said}]
        return CHAT, f"<|user|>\n{said}\n<|assistant|>\n", {**common, "messages": messages}
    return "/v1/completions", said, {**common, "prompt": said}


async def test_100_of_100_streams_survive_their_decode_worker(
    fleet: Fleet, model: Path, single: ModelRunner
) -> None:
    begun = 0

    async def stream(client: httpx2.AsyncClient, number: int) -> list[dict[str, Any]]:
        nonlocal begun
        path, _, body = body_of(number)
        parser = EventParser()
        events: list[ServerSentEvent] = []
        async with client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for part in answer.aiter_bytes():
                came = parser.feed(part)
                begun += bool(came) and not events
                events += came
        assert events[-1].data == "[DONE]", events[-1].data
        return [json.loads(event.data) for event in events[:-1]]

    limits = httpx2.Limits(max_connections=None)
    url = fleet.router.url
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        streams = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
        await until(lambda: begun == STREAMS)
        ended = sum(task.done() for task in streams)
        fleet.running["decode-0"].freeze()
        await asyncio.to_thread(start, fleet, model, "decode-1")
        fleet.kill("decode-0")
        answers = await asyncio.gather(*streams)
        metrics = (await client.get("/metrics")).text
    [went_on] = [
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("kvxfer_router_continued_streams_total")
    ]
    assert went_on == STREAMS - ended
    assert ended < STREAMS / 2, "it was killed too late for most streams"
    known: dict[str, list[int]] = {}
    for number, events in enumerate(answers):
        path, prompt, _ = body_of(number)
        if prompt not in known:
            known[prompt] = single.generate(prompt, TOKENS, ignore_eos=True)
        expected = known[prompt]
        choices = [choice for event in events for choice in event["choices"]]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        assert tokens == expected, number
        said = [choice["delta"] if path == CHAT else choice for choice in choices]
        text = "".join(each["content" if path == CHAT else "text"] for each in said)
        assert text == single.tokenizer.decode(expected)
        assert len({(event["id"], event["created"], event["object"]) for event in events}) == 1
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), TOKENS)
    await until(lambda: fleet.held_blocks() == 0 and not fleet.client.transfers())
