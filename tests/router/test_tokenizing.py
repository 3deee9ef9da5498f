"""Prompts of text and chats find their cached beginning by a worker's tokenizer, or go by load."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from kvxfer.instances import BlockUpdate, Role
from kvxfer.prefix_hashes import prompt_hashes
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import Network, Reply
from tests.virtual_time import VirtualClock, passes

from .servers import CHATS, DECODES, answers

TEXT = "The beginning of a long prompt, which is cached somewhere. " * 5
TOKENS = [ord(letter) for letter in TEXT]
COMPLETION = ("/v1/completions", {"model": "llama", "prompt": TEXT, "temperature": 0})
SAID = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CHAT = ("/v1/chat/completions", {"model": "llama", "messages": SAID, "tools": TOOLS, "seed": 1})
SEEN = [{"role": "user", "content": [*SAID[0]["content"], {"type": "image_url", "image_url": {}}]}]


class Fleet:
    """Two prefill workers and one decode worker; the prefill worker p2 has the prompt cached."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.prefilled: list[str] = []
        self.tokenized: list[dict[str, Any]] = []
        self.tokenize = self.tokens

    async def tokens(self, body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, "application/json")
        await reply.write(json.dumps({"count": len(TOKENS), "tokens": TOKENS}).encode())

    async def start(self) -> None:
        async def tokenize(body: dict[str, Any], reply: Reply) -> None:
            self.tokenized.append(body)
            await self.tokenize(body, reply)

        async def decodes(body: dict[str, Any], reply: Reply) -> None:
            await (CHATS if "messages" in body else DECODES)(body, reply)

        for name in ("p1", "p2"):

            async def prefills(_body: dict[str, Any], reply: Reply, name: str = name) -> None:
                self.prefilled.append(name)
                await answers(200, "application/json", b"{}")(_body, reply)

            await self._network.join(name, Role.PREFILL, prefills, tokenize=tokenize)
        await self._network.join("d1", Role.DECODE, decodes)
        async with self._network.client() as client:
            epoch = (await client.instance("p2")).epoch
            cached = BlockUpdate(added=prompt_hashes(TOKENS, "llama"))
            await client.publish_blocks("p2", epoch, cached)


@pytest.fixture
async def fleet(network: Network, control_plane: EmbeddedRegistry) -> Fleet:
    made = Fleet(network)
    await made.start()
    return made


async def ask(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> None:
    (await client.post(path, json=body)).raise_for_status()


@pytest.mark.parametrize(
    ("asked", "members"),
    [(COMPLETION, {"model", "prompt"}), (CHAT, {"model", "messages", "tools"})],
    ids=["text", "chat"],
)
async def test_a_prompt_goes_where_its_tokens_are_cached_and_is_tokenized_once(
    network: Network, fleet: Fleet, asked: tuple[str, dict[str, Any]], members: set[str]
) -> None:
    path, body = asked
    async with network.routed() as client:
        for _ in range(4):
            await ask(client, path, body)
        counted = (await client.get("/metrics")).text
    # No worker is known before the first request, which went by load.
    assert fleet.prefilled[1:] == ["p2"] * 3
    assert fleet.tokenized == [{name: body[name] for name in members}]
    assert 'kvxfer_router_tokenized_total{outcome="cached"} 2.0' in counted
    assert 'kvxfer_router_tokenized_total{outcome="asked"} 1.0' in counted


async def test_a_worker_that_is_late_holds_up_no_request_and_its_answer_serves_the_next(
    network: Network, fleet: Fleet, clock: VirtualClock
) -> None:
    said = asyncio.Event()

    async def late(body: dict[str, Any], reply: Reply) -> None:
        await said.wait()
        await fleet.tokens(body, reply)

    fleet.tokenize = late
    async with network.routed(tokenize_seconds=0.2) as client:
        await ask(client, *COMPLETION)
        before = clock.monotonic()
        await ask(client, *COMPLETION)
        assert clock.monotonic() - before == pytest.approx(0.2)
        said.set()
        await passes(0.001)
        await ask(client, *COMPLETION)
        assert fleet.prefilled[-1] == "p2"
        assert len(fleet.tokenized) == 1
        counted = (await client.get("/metrics")).text
    assert 'kvxfer_router_tokenized_total{outcome="late"} 1.0' in counted


@pytest.mark.parametrize(
    ("status", "content"),
    [(404, b""), (200, b"no JSON"), (200, b'{"tokens": [-1]}'), (200, b'{"tokens": "1"}')],
)
async def test_a_worker_that_cannot_say_is_left_alone_for_a_while(
    network: Network, fleet: Fleet, clock: VirtualClock, status: int, content: bytes
) -> None:
    fleet.tokenize = answers(status, "application/json", content)
    async with network.routed() as client:
        for _ in range(4):
            await ask(client, *COMPLETION)
        assert len(fleet.tokenized) == 1
        clock.advance(10)
        fleet.tokenize = fleet.tokens
        await ask(client, *COMPLETION)
    assert fleet.prefilled[-1] == "p2"


@pytest.mark.parametrize(
    ("path", "body", "settings"),
    [
        (*COMPLETION, {"tokenize_seconds": 0}),
        (COMPLETION[0], {**COMPLETION[1], "prompt": "short"}, {}),
        (CHAT[0], {**CHAT[1], "messages": SEEN}, {}),
    ],
    ids=["off", "short", "an image"],
)
async def test_nobody_is_asked_where_that_tells_nothing(
    network: Network, fleet: Fleet, path: str, body: dict[str, Any], settings: dict[str, Any]
) -> None:
    async with network.routed(**settings) as client:
        for _ in range(2):
            await ask(client, path, body)
    assert fleet.tokenized == []
