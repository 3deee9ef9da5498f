"""The fleet of the tutorial and of the runbooks, with fewer blocks. Its router knows nothing of the
engine, and serves in turn the requests that come at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from verify.polling import eventually
from verify.processes.fleet import Fleet

pytestmark = pytest.mark.native

REQUESTS = 6
# A token is a byte here, so one prompt fits the blocks and two do not. At four bytes for a token,
# all six would.
BLOCKS = 48
PROMPT = "All that is asked at once. " * 18
ASKED = {"model": "kvxfer-demo-8l", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        fleet.start_control_plane()
        for name in ("prefill-1", "decode-1"):
            fleet.begin_worker(name, "--blocks", str(BLOCKS), "--threads", "1")
        # The limits leave time for a busy machine.
        fleet.start_router("--capacity-seconds", "300", "--first-token-seconds", "300")
        yield fleet


async def test_requests_that_come_at_once_are_all_answered(fleet: Fleet) -> None:
    await eventually(lambda: asyncio.to_thread(fleet.whole), 120)
    async with httpx2.AsyncClient(base_url=fleet.router.url, timeout=None) as client:

        async def ask(number: int) -> httpx2.Response:
            prompt = PROMPT.replace("asked", f"ask {number}")
            body: dict[str, Any] = {**ASKED, "prompt": prompt, "stream": number % 2 == 1}
            return await client.post("/v1/completions", json=body)

        answers = await asyncio.gather(*map(ask, range(REQUESTS)))
    assert [answer.status_code for answer in answers] == [200] * REQUESTS, [
        answer.text for answer in answers
    ]
    for answer in answers[::2]:
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 8)
    for answer in answers[1::2]:
        events = answer.text.strip().split("\n\n")
        assert (len(events), events[-1]) == (9, "data: [DONE]")
