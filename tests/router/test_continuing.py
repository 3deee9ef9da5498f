"""`--continue-streams`: another worker continues the stream of a decode worker that is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from kvxfer.event_stream import EventParser
from kvxfer.instances import Load, Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import Answer, Network, Reply
from tests.virtual_time import VirtualClock, passes

from .servers import answers, chat_chunk, chunk, whole
from .vllm_like import (
    CONTEXT,
    EVENTS,
    Model,
    VllmLike,
    decoded,
    detokenizes,
    events,
    lists_models,
    prompt_of,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "llama", "prompt": "say €", "max_tokens": 40},
    CHAT: {
        "model": "llama",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 40,
    },
}
USAGE = {"include_usage": True}
CACHED = {"prompt_tokens_details": {"cached_tokens": 3}}
PREFILLS = answers(
    200,
    "application/json",
    whole("text_completion", {"text": "x"}, usage={"prompt_tokens": 9, **CACHED}),
)


@dataclass
class Said:
    """The contents of all events of a stream."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: list[Any] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    heads: set[tuple[Any, ...]] = field(default_factory=set)
    roles: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False
    seen: set[str] = field(default_factory=set)
    """The names of members of choices that are not null."""


def said_by(content: bytes) -> Said:
    said = Said()
    for event in EventParser().feed(content):
        assert not said.done
        if event.data == "[DONE]":
            said.done = True
            continue
        told = json.loads(event.data)
        if "error" in told:
            said.error = told["error"]
            continue
        said.heads.add(tuple(told[name] for name in ("id", "object", "created", "model")))
        if told.get("usage"):
            said.usage.append(told["usage"])
        if told.get("prompt_token_ids"):
            said.seen.add("prompt_token_ids")
        for choice in told["choices"]:
            said.seen |= {name for name, value in choice.items() if value is not None}
            delta = choice.get("delta", {})
            said.roles += [delta["role"]] if "role" in delta else []
            said.text += delta.get("content", "") if "delta" in choice else choice["text"]
            said.ids += choice.get("token_ids") or []
            if choice["finish_reason"]:
                said.finish.append((choice["finish_reason"], choice["stop_reason"]))
    return said


class Fleet:
    """A prefill worker, a decode worker that is lost, and one that stays."""

    def __init__(self, network: Network, lost: Answer, stays: VllmLike | None = None) -> None:
        self._network = network
        self._lost = lost
        self.stays = stays or VllmLike()
        self.prefills: list[dict[str, Any]] = []
        self.detokenized = 0

    async def _prefill(self, body: dict[str, Any], reply: Reply) -> None:
        self.prefills.append(body)
        await PREFILLS(body, reply)

    async def _detokenize(self, body: dict[str, Any], reply: Reply) -> None:
        self.detokenized += 1
        await detokenizes(body, reply)

    async def join(self) -> None:
        others = {"/detokenize": self._detokenize, "/v1/models": lists_models}
        await self._network.join("p", Role.PREFILL, self._prefill, others=others)
        for name, worker in (("d1", self._lost), ("d2", self.stays)):
            await self._network.join(name, Role.DECODE, worker, others={"/v1/models": lists_models})


async def ask(
    network: Network, path: str, body: Mapping[str, Any], **settings: Any
) -> tuple[httpx2.Response, str]:
    """Sends a request for a stream; returns the answer, and the router's metrics after it."""
    settings = {"continue_streams": True, **settings}
    async with network.routed(**settings) as client:
        answer = await client.post(path, json={**ASKED[path], **body, "stream": True})
        return answer, (await client.get("/metrics")).text


def undisturbed(path: str, body: Mapping[str, Any], request_id: str) -> Said:
    """Returns what a worker that is not lost sends."""
    asked = {**ASKED[path], **body, "stream": True}
    said = said_by(b"".join(events(Model(), asked, request_id)))
    for usage in said.usage:
        if "prompt_tokens_details" in usage:
            usage |= CACHED
    return said


def died_of(path: str, body: Mapping[str, Any], rng: random.Random) -> int:
    """Returns a random number of events, at least one, and at least two if there are more."""
    number = len(list(events(Model(), {**ASKED[path], **body}, "x")))
    return rng.randrange(2, number) if number > 2 else 1


STOPS: list[dict[str, Any]] = [
    {},
    {"stop": "END"},
    {"stop": ["END", "ab", "€\n"]},
    {"stop": ["ENDab", "xEN", "🙂€"], "include_stop_str_in_output": True},
    {"stop": ["ab the", "é\n", "€🙂€"], "min_tokens": 12},
    {"stop": "ENDEND a", "min_tokens": 30, "ignore_eos": True},
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"stream_options": USAGE},
    {"stream_options": {**USAGE, "continuous_usage_stats": True}},
    {"return_token_ids": True, "stream_options": USAGE},
    {"ignore_eos": True},
    {"min_tokens": 20},
]


@pytest.mark.parametrize("path", ASKED)
async def test_streams_of_lost_workers_equal_undisturbed_ones(
    network: Network, control_plane: EmbeddedRegistry, rng: random.Random, path: str
) -> None:
    """Workers are lost after any event, with all kinds of stop strings."""
    lost = VllmLike()
    fleet = Fleet(network, lost)
    await fleet.join()
    went_on = 0
    async with network.routed(continue_streams=True) as client:
        for number in range(150):
            body = {**rng.choice(STOPS), **rng.choice(OTHERS), "temperature": 0}
            body |= {"ignore_eos": True} if number % 2 else {}
            prompt = f"say {number}€"
            if path == COMPLETIONS:
                body["prompt"] = prompt
            else:
                body["messages"] = [{"role": "user", "content": prompt}]
            lost.dies_after = died_of(path, body, rng)
            fleet.stays.asked.clear()
            answer = await client.post(path, json={**ASKED[path], **body, "stream": True})
            said = said_by(answer.content)
            expected = undisturbed(path, body, answer.headers["x-request-id"])
            assert said.error is None, body
            assert said == expected, body
            went_on += any(isinstance(each.get("prompt"), list) for each in fleet.stays.asked)
        metrics = (await client.get("/metrics")).text
    assert went_on > 50
    assert f"kvxfer_router_continued_streams_total {went_on:.1f}" in metrics
    assert "kvxfer_router_failed_streams_total{" not in metrics
    assert not await control_plane.transfers()


async def test_the_other_worker_is_asked_for_what_is_missing(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    fleet = Fleet(network, VllmLike(dies_after=20))
    await fleet.join()
    body = {
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["nowhere"],
        "min_tokens": 20,
        "ignore_eos": True,
        "cache_salt": "s",
        "priority": 3,
        "metadata": {"a": "b"},
        "add_generation_prompt": True,
    }
    answer, _ = await ask(network, CHAT, body)
    said = said_by(answer.content)
    [asked] = fleet.stays.asked
    prompt = prompt_of(ASKED[CHAT])
    told = asked["prompt"][len(prompt) :]
    assert asked.pop("prompt") == prompt + told
    assert asked.pop("kv_transfer_params")["ticket"]
    assert 1 <= len(told) <= 18
    assert asked == {
        **{name: body[name] for name in ("temperature", "top_p", "stop", "ignore_eos")},
        "cache_salt": "s",
        "priority": 3,
        "stream": True,
        "model": "llama",
        "min_tokens": 20 - len(told),
        "max_tokens": 40 - len(told),
    }
    assert "return_token_ids" not in fleet.prefills[0]
    assert said.text.startswith(decoded(told))


@pytest.mark.parametrize("path", ASKED)
async def test_no_token_is_seen_twice_or_missing_at_any_temperature(
    network: Network, control_plane: EmbeddedRegistry, rng: random.Random, path: str
) -> None:
    """The other worker's model chooses other tokens, but never again those that the client has."""
    lost = VllmLike(counts=lambda number: 1 + number % 3)
    fleet = Fleet(network, lost, VllmLike(seed=1))
    await fleet.join()
    torn = 0
    async with network.routed(continue_streams=True) as client:
        for number in range(200):
            body = {**ASKED[path], **rng.choice(STOPS), "temperature": 1.0}
            body |= {"user": str(number), "ignore_eos": True, "stream": True}
            lost.dies_after = rng.randrange(3, 15)
            fleet.stays.asked.clear()
            answer = await client.post(path, json=body)
            said = said_by(answer.content)
            if not fleet.stays.asked or "messages" in fleet.stays.asked[0]:
                continue
            [asked] = fleet.stays.asked
            if isinstance(asked["prompt"], str):
                continue
            told = asked["prompt"][len(prompt_of(body)) :]
            rest = said_by(b"".join(events(Model(1), asked, "x")))
            before = decoded(told)
            torn += before.endswith("\ufffd")
            assert said.text == before + rest.text, body
            assert said.finish == rest.finish
    assert fleet.detokenized
    assert not torn


async def test_a_chat_without_a_limit_ends_with_the_context(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    fleet = Fleet(network, VllmLike(dies_after=9))
    await fleet.join()
    body = {"max_completion_tokens": None, "ignore_eos": True, "stream_options": USAGE}
    answer, _ = await ask(network, CHAT, body)
    said = said_by(answer.content)
    assert said == undisturbed(CHAT, body, answer.headers["x-request-id"])
    assert said.usage[-1]["total_tokens"] == CONTEXT


# --- what is not continued -------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"seed": 1}, "seed"),
    (COMPLETIONS, {"seed": 1, "temperature": 0.1}, "seed"),
    (CHAT, {"seed": 0, "temperature": 1}, "seed"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    (COMPLETIONS, {"guided_json": {}}, "guided_json"),
    (COMPLETIONS, {"logprobs": 0}, "logprobs"),
    (CHAT, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"n": 2}, "n"),
    (CHAT, {"n": 2}, "n"),
    (COMPLETIONS, {"echo": True}, "echo"),
    (COMPLETIONS, {"suffix": "b"}, "suffix"),
    (COMPLETIONS, {"presence_penalty": 0.5}, "presence_penalty"),
    (CHAT, {"frequency_penalty": -1}, "frequency_penalty"),
    (CHAT, {"bad_words": ["x"]}, "bad_words"),
    (CHAT, {"include_reasoning": False}, "include_reasoning"),
    (CHAT, {"thinking_token_budget": 10}, "thinking_token_budget"),
    (COMPLETIONS, {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    (COMPLETIONS, {"of_the_future": 1}, "of_the_future"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
]
HARMLESS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"seed": 1, "temperature": 0}),
    (COMPLETIONS, {"n": 1, "echo": False, "logprobs": None, "presence_penalty": 0.0}),
    (CHAT, {"n": 1, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"}),
    (CHAT, {"response_format": {"type": "text"}, "include_reasoning": True, "store": False}),
    (COMPLETIONS, {"repetition_penalty": 1.1, "logit_bias": {"5": 1}, "stop_token_ids": [500]}),
]


def breaks_off(path: str) -> Answer:
    said = chat_chunk(content="a") if path == CHAT else chunk("a")
    return answers(200, EVENTS, said)


@pytest.mark.parametrize(("path", "body", "member"), REFUSED)
async def test_the_error_names_the_member_that_prevents_continuing(
    network: Network, control_plane: EmbeddedRegistry, path: str, body: Any, member: str
) -> None:
    fleet = Fleet(network, breaks_off(path))
    await fleet.join()
    fleet.stays.dies_after = 3
    answer, metrics = await ask(network, path, {"ignore_eos": True, **body})
    error = said_by(answer.content).error
    assert error is not None
    assert (error["code"], error["type"], error["param"]) == ("peer-lost", "server_error", member)
    assert error["message"].endswith(
        f"; the stream does not go on at another worker because of {member}"
    )
    assert 'kvxfer_router_failed_streams_total{code="peer-lost"} 1.0' in metrics
    assert "kvxfer_router_continued_streams_total 0.0" in metrics


@pytest.mark.parametrize(("path", "body"), HARMLESS)
async def test_members_without_effect_do_not_prevent_continuing(
    network: Network, control_plane: EmbeddedRegistry, path: str, body: Any
) -> None:
    fleet = Fleet(network, VllmLike(dies_after=6))
    await fleet.join()
    answer, metrics = await ask(network, path, {"ignore_eos": True, **body})
    assert said_by(answer.content).done, answer.text
    assert "kvxfer_router_continued_streams_total 1.0" in metrics


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/generate"])
async def test_streams_of_other_routes_are_not_continued(
    network: Network, control_plane: EmbeddedRegistry, path: str
) -> None:
    async def falls_silent(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, EVENTS)
        await reply.write(b'data: {"text": "a"}\n\n')
        await asyncio.Event().wait()

    await Fleet(network, falls_silent, VllmLike(dies_after=1, dies=falls_silent)).join()
    said = [{"role": "user", "content": "hi"}]
    body = {"model": "llama", "input": "hi", "text": "hi", "messages": said, "max_tokens": 9}
    async with network.routed(continue_streams=True, token_seconds=1) as client:
        answer = await client.post(path, json={**body, "stream": True})
    assert f"does not go on at another worker because of {path}" in answer.text


ROLE = chat_chunk(role="assistant", content="")


def chat_event(**choice: Any) -> bytes:
    told = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "llama"}
    choice = {"index": 0, "finish_reason": None, **choice}
    return b"data: " + json.dumps({**told, "choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("told", "member"),
    [
        (chat_event(delta={"reasoning": "hm"}, token_ids=[1]), "reasoning"),
        (chat_event(delta={}, token_ids=[1]) + chat_event(delta={"content": "a"}), "reasoning"),
        (chat_event(delta={"tool_calls": [{"index": 0}]}, token_ids=[1]), "tool_calls"),
        (chat_event(delta={"content": "a"}), "return_token_ids"),
    ],
)
async def test_a_stream_whose_text_may_differ_from_its_tokens_is_not_continued(
    network: Network, control_plane: EmbeddedRegistry, told: bytes, member: str
) -> None:
    """The server has a parser, or sends no tokens."""
    lost = answers(200, EVENTS, ROLE + told)
    await Fleet(network, lost, VllmLike(dies_after=0)).join()
    answer, _ = await ask(network, CHAT, {})
    error = said_by(answer.content).error
    assert error is not None
    assert error["param"] == member
    assert b'"token_ids":[' not in answer.content
    assert answer.content.count(b'"delta":{}') == 0


@pytest.mark.parametrize("path", ASKED)
async def test_by_default_streams_end_with_the_error_and_bodies_are_not_changed(
    network: Network, control_plane: EmbeddedRegistry, path: str
) -> None:
    lost = VllmLike(dies_after=6)
    fleet = Fleet(network, lost)
    await fleet.join()
    answer, metrics = await ask(network, path, {"ignore_eos": True}, continue_streams=False)
    error = said_by(answer.content).error
    assert error is not None
    assert (error["code"], error["param"]) == ("peer-lost", None)
    assert "go on" not in error["message"]
    [asked] = lost.asked
    assert "return_token_ids" not in asked
    assert not fleet.stays.asked
    assert 'kvxfer_router_failed_streams_total{code="peer-lost"} 1.0' in metrics


async def test_a_stream_is_continued_only_once(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    fleet = Fleet(network, VllmLike(dies_after=6), VllmLike(dies_after=3))
    await fleet.join()
    answer, metrics = await ask(network, COMPLETIONS, {"ignore_eos": True})
    error = said_by(answer.content).error
    assert error is not None
    assert error["message"].endswith("does not go on at another worker as it has gone on once")
    assert "kvxfer_router_continued_streams_total 1.0" in metrics
    assert not await control_plane.transfers()


async def test_the_worker_that_was_lost_is_avoided(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    """The lost worker is still the least loaded one."""
    lost = VllmLike(dies_after=6)
    fleet = Fleet(network, lost)
    await fleet.join()
    epoch = (await control_plane.instance("d2")).epoch
    await control_plane.heartbeat("d2", epoch, load=Load(running=50))
    answer, metrics = await ask(network, COMPLETIONS, {"ignore_eos": True})
    assert said_by(answer.content).done
    assert (len(lost.asked), len(fleet.stays.asked)) == (1, 1)
    assert "kvxfer_router_retries_total{" not in metrics


async def test_a_continuation_that_fails_before_its_first_event_is_tried_again(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    """The lost worker is not tried again."""
    lost, fails = VllmLike(dies_after=6), VllmLike(dies_after=0)
    fleet = Fleet(network, lost, fails)
    await fleet.join()
    other = VllmLike()
    await network.join("d3", Role.DECODE, other)
    body = {"ignore_eos": True}
    seen = set()
    for _ in range(8):
        for worker in (lost, fails, other):
            worker.asked.clear()
        answer, _ = await ask(network, COMPLETIONS, body)
        said = said_by(answer.content)
        assert said == undisturbed(COMPLETIONS, body, answer.headers["x-request-id"])
        assert len(lost.asked) <= 1
        seen.add((len(lost.asked), len(fails.asked), len(other.asked)))
    assert (1, 1, 1) in seen


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("lacking", ["[DONE]", "usage"])
async def test_a_stream_that_lacks_only_its_end_gets_it_from_the_router(
    network: Network, control_plane: EmbeddedRegistry, path: str, lacking: str
) -> None:
    body = {"ignore_eos": True, "stream_options": USAGE}
    sent = list(events(Model(), {**ASKED[path], **body}, "x"))
    assert b'"usage"' in sent[-2]
    lost = VllmLike(dies_after=len(sent) - (1 if lacking == "[DONE]" else 2))
    fleet = Fleet(network, lost)
    await fleet.join()
    answer, metrics = await ask(network, path, body)
    said = said_by(answer.content)
    assert said == undisturbed(path, body, answer.headers["x-request-id"])
    assert lost.asked
    assert not fleet.stays.asked
    assert "kvxfer_router_continued_streams_total 0.0" in metrics


async def test_an_error_in_the_stream_of_a_worker_counts_as_its_loss(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    async def says_error(_body: dict[str, Any], reply: Reply) -> None:
        await reply.write(b'\n\ndata: {"error": {"message": "engine dead", "code": 500}}\n\n')

    fleet = Fleet(network, VllmLike(dies_after=6, dies=says_error))
    await fleet.join()
    body = {"ignore_eos": True}
    answer, metrics = await ask(network, COMPLETIONS, body)
    said = said_by(answer.content)
    assert said == undisturbed(COMPLETIONS, body, answer.headers["x-request-id"])
    assert "kvxfer_router_continued_streams_total 1.0" in metrics


async def test_one_worker_that_serves_alone_takes_over_from_another(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    lost, stays = VllmLike(dies_after=6), VllmLike()
    for name, worker in (("d1", lost), ("d2", stays)):
        await network.join(name, Role.DECODE, worker, aggregates=True)
    body = {"ignore_eos": True}
    answer, metrics = await ask(network, CHAT, body)
    assert said_by(answer.content) == undisturbed(CHAT, body, answer.headers["x-request-id"])
    [asked] = stays.asked
    assert "kv_transfer_params" not in asked
    assert "kvxfer_router_continued_streams_total 1.0" in metrics


async def test_a_silent_worker_counts_as_lost(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock
) -> None:
    async def falls_silent(_body: dict[str, Any], _reply: Reply) -> None:
        await asyncio.Event().wait()

    lost = VllmLike(dies_after=6, dies=falls_silent)
    fleet = Fleet(network, lost)
    await fleet.join()
    body = {"ignore_eos": True}
    answer, _ = await ask(network, COMPLETIONS, body, token_seconds=5)
    said = said_by(answer.content)
    assert said == undisturbed(COMPLETIONS, body, answer.headers["x-request-id"])
    assert lost.asked
    assert not lost.under_way


async def test_a_client_that_leaves_frees_the_worker_that_continues(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    begun = asyncio.Event()

    async def hangs(_body: dict[str, Any], _reply: Reply) -> None:
        begun.set()
        await asyncio.Event().wait()

    lost, stays = VllmLike(dies_after=6), VllmLike(dies_after=2, dies=hangs)
    fleet = Fleet(network, lost, stays)
    await fleet.join()
    asked = {**ASKED[COMPLETIONS], "ignore_eos": True, "stream": True}
    async with network.routed(continue_streams=True) as client:
        async with client.stream("POST", COMPLETIONS, json=asked) as answer:
            reading = asyncio.create_task(answer.aread())
            await begun.wait()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await passes(0.01)
        metrics = (await client.get("/metrics")).text
    assert not lost.under_way
    assert not stays.under_way
    assert not await control_plane.transfers()
    assert "kvxfer_router_aborted_total 1.0" in metrics
