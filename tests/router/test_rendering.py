"""Chats are rendered once. A worker's tokenizer finds the cached beginning of prompts; otherwise
load decides."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from kvxfer.instances import BlockUpdate, Role
from kvxfer.prefix_hashes import prompt_hashes
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import Answer, Network, Reply
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

            await self._network.join(name, Role.PREFILL, prefills, others={"/tokenize": tokenize})
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
    assert fleet.prefilled == ["p2"] * 4
    assert fleet.tokenized == [{name: body[name] for name in members}]
    assert 'kvxfer_router_tokenized_total{outcome="cached"} 3.0' in counted
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


async def test_reservations_use_what_is_known_of_the_tokens(
    network: Network,
    control_plane: EmbeddedRegistry,
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If its tokens come too late, a text counts as many bytes for a token as earlier texts had."""
    reserve, reserved = control_plane.reserve, list[int]()

    async def noted(request: Any, *arguments: Any, **options: Any) -> Any:
        reserved.append(request.prompt_tokens)
        return await reserve(request, *arguments, **options)

    async def never(_body: dict[str, Any], _reply: Reply) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(control_plane, "reserve", noted)
    path, body = COMPLETION
    async with network.routed() as client:
        fleet.tokenize = never
        await ask(client, path, body)
        fleet.tokenize = fleet.tokens
        await ask(client, path, {**body, "prompt": TEXT[::-1]})
        fleet.tokenize = never
        await ask(client, path, {**body, "prompt": "é" * 100})
        await ask(client, path, {**body, "prompt": "short"})
        # The answer to a chat tells nothing of the bytes of a text's tokens.
        fleet.tokenize = fleet.tokens
        await ask(client, CHAT[0], {**CHAT[1], "messages": [{"role": "user", "content": "hi"}]})
        await ask(client, path, {**body, "prompt": "short"})
    assert len(TEXT) == len(TOKENS) == 295
    assert reserved == [74, 295, 200, 5, 295, 5]


@pytest.mark.parametrize("status", [400, 422])
async def test_a_tokenizer_that_refuses_a_prompt_is_asked_for_the_next_one(
    network: Network, fleet: Fleet, status: int
) -> None:
    fleet.tokenize = answers(status, "application/json", b"{}")
    async with network.routed() as client:
        await ask(client, *COMPLETION)
        fleet.tokenize = fleet.tokens
        await ask(client, *COMPLETION)
    assert len(fleet.tokenized) == 2
    assert fleet.prefilled[-1] == "p2"


@pytest.mark.parametrize(
    ("status", "content"),
    [(404, b""), (200, b"no JSON"), (200, b'{"tokens": [-1]}'), (200, b'{"tokens": "1"}')],
)
async def test_a_worker_that_cannot_tokenize_is_not_asked_for_a_while(
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
async def test_no_tokenizer_is_asked_if_its_answer_would_not_help(
    network: Network, fleet: Fleet, path: str, body: dict[str, Any], settings: dict[str, Any]
) -> None:
    async with network.routed(**settings) as client:
        for _ in range(2):
            await ask(client, path, body)
    assert fleet.tokenized == []


# --- chats are rendered once -----------------------------------------------------------------


RENDERED = {"request_id": "r", "token_ids": TOKENS, "features": None, "sampling_params": {}}
BODIES = {
    "/v1/chat/completions": {"messages": SAID, "tools": TOOLS, "seed": 1},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": SAID, "max_tokens": 4},
}


class Renderers:
    """A pair whose prefill worker renders chats with `render`. `asked` has its requests, `given`
    the tokens that the two workers were given."""

    def __init__(self, network: Network, render: Answer) -> None:
        self.network = network
        self.render = render
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.given: list[list[int] | None] = []

    async def start(self) -> None:
        async def renders(body: dict[str, Any], reply: Reply) -> None:
            self.asked.append((reply.path, body))
            await self.render(body, reply)

        async def answer(body: dict[str, Any], reply: Reply) -> None:
            self.given.append(body["kv_transfer_params"].get("prompt_token_ids"))
            await CHATS(body, reply)

        await self.network.join("p1", Role.PREFILL, answer, others={"/render": renders})
        await self.network.join("d1", Role.DECODE, answer)


def renders(status: int = 200, **changes: Any) -> Answer:
    return answers(status, "application/json", json.dumps({**RENDERED, **changes}).encode())


@pytest.mark.parametrize("path", BODIES)
async def test_a_chat_is_rendered_once_each_time_and_both_workers_get_its_tokens(
    network: Network, control_plane: EmbeddedRegistry, path: str
) -> None:
    """A chat is rendered anew for each request, as the template may have the time in it; and also
    at first, when no worker is known before the pair."""
    fleet = Renderers(network, renders())
    await fleet.start()
    body = {"model": "llama", **BODIES[path]}
    async with network.routed() as client:
        for _ in range(3):
            await ask(client, path, body)
        counted = (await client.get("/metrics")).text
    assert fleet.asked == [(path + "/render", {**body, "mm_payload": "none"})] * 3
    assert fleet.given == [TOKENS] * 6
    assert 'kvxfer_router_tokenized_total{outcome="rendered"} 3.0' in counted


@pytest.mark.parametrize(
    ("render", "asked"),
    [
        (renders(403), 1),  # vLLM without --enable-scale-out
        (renders(404), 1),
        (renders(features={"mm_hashes": {}}), 4),
        (renders(400), 4),
        (renders(token_ids=[-1]), 1),
        (renders(token_ids="1"), 1),
    ],
    ids=["off", "none", "images", "refused", "negative", "no list"],
)
async def test_each_worker_renders_what_none_has_rendered_for_both(
    network: Network, control_plane: EmbeddedRegistry, render: Answer, asked: int
) -> None:
    """A worker that cannot render is not asked for a while."""
    fleet = Renderers(network, render)
    await fleet.start()
    async with network.routed() as client:
        for _ in range(2):
            await ask(client, *CHAT)
    # It is asked before the pair is known, and then as its prefill worker.
    assert len(fleet.asked) in (asked, asked - 1)
    assert fleet.given == [None] * 4


async def test_a_chat_waits_for_its_tokens_and_not_for_ever(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock
) -> None:
    async def slow(body: dict[str, Any], reply: Reply) -> None:
        await passes(1.5)
        await renders()(body, reply)

    async def hangs(_body: dict[str, Any], _reply: Reply) -> None:
        await asyncio.Event().wait()

    fleet = Renderers(network, slow)
    await fleet.start()
    async with network.routed(render_seconds=2) as client:
        await ask(client, *CHAT)
        assert fleet.given == [TOKENS] * 2
        fleet.render, before = hangs, clock.monotonic()
        await ask(client, *CHAT)
        assert clock.monotonic() - before == pytest.approx(2, abs=0.1)
    assert fleet.given[2:] == [None] * 2


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({}, {"render_seconds": 0}),
        ({"messages": SEEN}, {}),
        ({"return_prompt_text": True}, {}),
    ],
    ids=["off", "an image", "text wanted"],
)
async def test_chats_that_must_not_be_rendered_are_not(
    network: Network, control_plane: EmbeddedRegistry, more: Any, settings: dict[str, Any]
) -> None:
    fleet = Renderers(network, renders())
    await fleet.start()
    async with network.routed(**settings) as client:
        await ask(client, CHAT[0], {**CHAT[1], **more})
    assert fleet.asked == []
    assert fleet.given == [None] * 2
