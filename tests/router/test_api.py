"""OpenAI's API of the router: answers, streams, and one clear error for every bad input."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvxfer.client import Credentials
from kvxfer.errors import InvalidArgument
from kvxfer.event_stream import EventParser
from kvxfer.instances import Load, Role
from kvxfer.reference.worker.completions import KvTransferParams
from kvxfer.router.api_keys import watch_api_keys
from kvxfer.router.settings import RouterSettings, watch_worker_key
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.web.tokens import watch_tokens
from tests.network import Answer, Network, Reply
from tests.virtual_time import passes
from verify.processes.control_plane import LAYOUT

from .servers import CHATS, COMPLETION, DECODES, PREFILLS, USAGE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

ASKED = {"model": "llama", "prompt": "hi"}
CHATTED = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}


def noting(bodies: dict[str, dict[str, Any]], role: Role) -> Any:
    """Returns an answer that keeps the request's body."""

    async def note(body: dict[str, Any], reply: Reply) -> None:
        bodies[role] = body
        answer = CHATS if "messages" in body else DECODES
        if role is Role.PREFILL:
            answer = PREFILLS
        await answer(body, reply)

    return note


@pytest.fixture
async def asked(network: Network, control_plane: EmbeddedRegistry) -> dict[str, dict[str, Any]]:
    """The bodies of the last requests to two workers, by role."""
    bodies: dict[str, dict[str, Any]] = {}
    await network.join("p", Role.PREFILL, noting(bodies, Role.PREFILL))
    await network.join("d", Role.DECODE, noting(bodies, Role.DECODE))
    return bodies


@pytest.fixture
async def client(
    network: Network, control_plane: EmbeddedRegistry
) -> AsyncIterator[httpx2.AsyncClient]:
    async with network.routed(max_body_bytes=1000) as client:
        yield client


def error_of(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


def events(answer: httpx2.Response) -> list[str]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [event.data for event in EventParser().feed(answer.content)]


async def test_an_answer_in_one_piece_is_decodes_byte_for_byte(client, asked) -> None:
    answer = await client.post(COMPLETIONS, json=ASKED, headers={"X-Request-ID": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == COMPLETION
    prefill, decode = asked["prefill"], asked["decode"]
    # With it, vLLM tells its connector of a request that its API refuses.
    assert decode["kv_transfer_params"].pop("do_remote_prefill") is True
    assert prefill["kv_transfer_params"] == decode["kv_transfer_params"]
    assert prefill["kv_transfer_params"].keys() == {"ticket", "prefill_engine_address"}
    assert (prefill["stream"], prefill["max_tokens"]) == (False, 1)
    assert decode.keys() == {*ASKED, "kv_transfer_params"}


async def test_both_workers_are_told_of_a_brokered_handshake(network, asked) -> None:
    async with network.routed(handshake="brokered") as client:
        assert (await client.post(COMPLETIONS, json=ASKED)).status_code == 200
    for side in ("prefill", "decode"):
        params = asked[side]["kv_transfer_params"]
        assert params.pop("ticket")
        assert params.pop("do_remote_prefill", False) is (side == "decode")
        assert params == {
            "handshake": "brokered",
            "prefill_engine_address": "kvx://127.0.0.1:1/p",
            "decode_engine_address": "kvx://127.0.0.1:1/d",
        }


async def test_workers_are_told_where_every_rank_of_prefill_is(network, control_plane) -> None:
    bodies: dict[str, dict[str, Any]] = {}
    ranks = ["kvx://127.0.0.1:1/p", "kvx://127.0.0.1:2/p"]
    both = {"layout": dataclasses.replace(LAYOUT, tp_size=2), "rank_addresses": tuple(ranks)}
    await network.join("p", Role.PREFILL, noting(bodies, Role.PREFILL), **both)
    await network.join("d", Role.DECODE, noting(bodies, Role.DECODE))
    async with network.routed() as client:
        assert (await client.post(COMPLETIONS, json=ASKED)).status_code == 200
    for side in ("prefill", "decode"):
        params = bodies[side]["kv_transfer_params"]
        assert params["prefill_rank_addresses"] == ranks
        assert KvTransferParams(**params).decode_dials == ranks


async def test_workers_of_sglang_are_told_of_a_bootstrap_server_and_a_room(
    network, control_plane
) -> None:
    bodies: dict[str, dict[str, Any]] = {}
    where = {"bootstrap_address": "10.0.0.5:8998"}
    await network.join("p", Role.PREFILL, noting(bodies, Role.PREFILL), **where)
    await network.join("d", Role.DECODE, noting(bodies, Role.DECODE))
    rooms = []
    async with network.routed() as client:
        for _ in range(3):
            assert (await client.post(COMPLETIONS, json=ASKED)).status_code == 200
            prefill, decode = bodies["prefill"], bodies["decode"]
            for body in (prefill, decode):
                assert (body["bootstrap_host"], body["bootstrap_port"]) == ("10.0.0.5", 8998)
                assert "kv_transfer_params" not in body
            assert prefill["bootstrap_room"] == decode["bootstrap_room"]
            rooms.append(decode["bootstrap_room"])
    assert len(set(rooms)) == 3
    assert all(0 <= room < 1 << 63 for room in rooms)


async def test_decode_streams_as_the_client_has_asked(client, asked) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "unheard_of": 1}
    body = {**ASKED, "stream": True, "stream_options": options}
    *chunks, done = events(await client.post(COMPLETIONS, json=body))
    assert done == "[DONE]"
    read = [json.loads(chunk) for chunk in chunks]
    assert [c["text"] for chunk in read for c in chunk["choices"]] == ["a", "b"]
    assert (asked["decode"]["stream"], asked["decode"]["stream_options"]) == (True, options)
    assert asked["prefill"]["stream"] is False
    assert "stream_options" not in asked["prefill"]


async def test_a_chat_reaches_the_workers_as_it_came(client, asked) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "tool", "tool_call_id": "7", "content": "42"},
    ]
    rest = {"max_completion_tokens": 9, "min_tokens": 5, "n": 2, "seed": 3, "user": "u"}
    answer = (await client.post(CHAT, json={"model": "llama", "messages": messages, **rest})).json()
    assert answer["object"] == "chat.completion"
    assert answer["usage"] == USAGE
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab"},
            "finish_reason": "stop",
        }
    ]
    prefill, decode = asked["prefill"], asked["decode"]
    assert prefill["messages"] == decode["messages"] == messages
    assert decode.items() >= rest.items()
    assert (prefill["max_tokens"], prefill["user"]) == (1, "u")
    assert not prefill.keys() & {"max_completion_tokens", "min_tokens", "n", "seed"}


async def test_a_chat_streams_deltas(client, asked) -> None:
    *chunks, done = events(await client.post(CHAT, json={**CHATTED, "stream": True}))
    assert done == "[DONE]"
    read = [json.loads(chunk) for chunk in chunks]
    assert {chunk["object"] for chunk in read} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in read}) == 1
    deltas = [choice["delta"] for chunk in read for choice in chunk["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]


async def test_models_are_those_of_ready_instances(client, asked) -> None:
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [(model["id"], model["object"]) for model in answer["data"]] == [("llama", "model")]


async def test_aliases_and_adapters_are_listed_and_served(
    client, asked, control_plane: EmbeddedRegistry
) -> None:
    refused = await client.post(COMPLETIONS, json={**ASKED, "model": "sql"})
    error_of(refused, 404, "model_not_found")
    for name in ("p", "d"):
        epoch = (await control_plane.instance(name)).epoch
        await control_plane.heartbeat(name, epoch, load=Load(models=("sql", "llama-latest")))
    await passes(1)  # the router remembers for a second what the fleet serves
    listed = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["llama", "llama-latest", "sql"]
    answer = await client.post(COMPLETIONS, json={**ASKED, "model": "sql"})
    assert answer.status_code == 200
    assert [body["model"] for body in asked.values()] == ["sql", "sql"]
    assert (await client.get("/v1/models/llama-latest")).json()["id"] == "llama-latest"
    error_of(await client.get("/v1/models/none/at/all"), 404, "model_not_found")


async def test_models_are_described_as_their_own_servers_do(network, control_plane) -> None:
    card = {"id": "llama", "object": "model", "owned_by": "vllm", "max_model_len": 4096}

    async def describes(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, "application/json")
        await reply.write(json.dumps({"object": "list", "data": [card]}).encode())

    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        await network.join(name, role, DECODES, others={"/v1/models": describes})
    async with network.routed() as client:
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await client.get("/v1/models/llama")).json() == card


async def test_workers_get_their_key_and_the_headers_that_are_forwarded(
    network: Network, control_plane: EmbeddedRegistry, tmp_path: Path
) -> None:
    got: list[Mapping[str, str]] = []

    def noted(answer: Answer) -> Answer:
        async def note(body: dict[str, Any], reply: Reply) -> None:
            got.append(reply.headers)
            await answer(body, reply)

        return note

    await network.join("p", Role.PREFILL, noted(PREFILLS))
    await network.join("d", Role.DECODE, noted(DECODES))
    (tmp_path / "key").write_text("a-key-of-workers\n")
    key = watch_worker_key(tmp_path / "key")
    sent = {"X-Tenant": "blue", "X-Secret": "none", "Authorization": "Bearer of-the-client"}
    async with network.routed(worker_key=key, forward_headers=("X-Tenant",)) as client:
        assert (await client.post(COMPLETIONS, json=ASKED, headers=sent)).status_code == 200
    assert len(got) == 2
    for headers in got:
        assert headers["authorization"] == "Bearer a-key-of-workers"
        assert headers["x-tenant"] == "blue"
        assert "x-secret" not in headers


def test_headers_and_keys_that_cannot_be_sent_are_refused_by_name(tmp_path: Path) -> None:
    for header, text in (("authorization", "header authorization"), ("X Y", "'X Y' is no name")):
        with pytest.raises(InvalidArgument, match=text):
            RouterSettings(forward_headers=(header,))
    (tmp_path / "key").write_text("\n")
    with pytest.raises(InvalidArgument, match="the worker key file has no key"):
        watch_worker_key(tmp_path / "key")


async def test_health_is_answered_as_inference_servers_do(client) -> None:
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "param", "message"),
    [
        (COMPLETIONS, {**ASKED, "kv_transfer_params": {}}, "kv_transfer_params", "router makes"),
        (CHAT, {**CHATTED, "kv_transfer_params": "x"}, "kv_transfer_params", "router makes"),
    ],
)
async def test_the_error_names_a_member_that_clients_may_not_set(
    client, asked, route, body, param, message
) -> None:
    error = error_of(await client.post(route, json=body), 400, "invalid-argument")
    assert error["param"] == param
    assert message in error["message"]
    assert not asked


async def test_a_request_without_a_model_is_for_the_only_model(client, asked, network) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": "hi"})
    assert answer.status_code == 200
    assert "model" not in asked["decode"]
    await network.join("q", Role.PREFILL, PREFILLS, model="qwen")
    await passes(1)
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "hi"}), 400, "invalid-argument")
    assert (error["param"], error["message"]) == (
        "model",
        "model: the fleet serves llama, qwen; name one of them",
    )


async def test_a_body_that_is_too_large_is_not_read(client, asked) -> None:
    answer = await client.post(COMPLETIONS, json={**ASKED, "prompt": "x" * 1000})
    assert "1000 bytes" in error_of(answer, 413, "body-too-large")["message"]

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 100

    answer = await client.post(COMPLETIONS, content=endless())
    error_of(answer, 413, "body-too-large")


async def test_a_prompt_that_no_worker_can_hold_is_too_long(network, asked) -> None:
    async with network.routed() as client:
        ids = {**ASKED, "prompt": [1] * (64 * 16 + 1)}
        answer = await client.post(COMPLETIONS, json=ids)
        error_of(answer, 400, "context_length_exceeded")
        text = {**ASKED, "prompt": "x" * (64 * 16 + 1)}
        assert (await client.post(COMPLETIONS, json=text)).status_code == 200


async def test_without_workers_the_answer_is_a_503_that_says_when_to_retry(
    network, control_plane, clock
) -> None:
    async with network.routed(capacity_seconds=5) as client:
        for stream in (False, True):
            asked_at = clock.monotonic()
            answer = await client.post(COMPLETIONS, json={**ASKED, "stream": stream})
            # The router asks again until the next pause, of up to 0.2 s, would end too late.
            assert 4.8 <= clock.monotonic() - asked_at <= 5
            error = error_of(answer, 503, "no-capacity")
            assert "no instance of model 'llama' is registered" in error["message"]
            assert answer.headers["retry-after"] == "1"


async def test_the_error_names_a_control_plane_that_stalls_while_a_request_waits(
    network, control_plane, clock
) -> None:
    answering, came = network.apps["control-plane"], clock.monotonic()

    async def stalls(scope: Any, receive: Any, send: Any) -> None:
        async def sends(message: Any) -> None:
            if clock.monotonic() > came + 1:
                await asyncio.Event().wait()
            await send(message)

        await answering(scope, receive, sends)

    network.apps["control-plane"] = stalls
    async with network.routed(capacity_seconds=5) as client:
        answer = await client.post(COMPLETIONS, json=ASKED)
        assert clock.monotonic() - came == pytest.approx(10, abs=0.2)
    error_of(answer, 503, "control-plane-unavailable")


async def test_a_request_waits_in_one_call_as_long_as_it_may(network, control_plane, clock) -> None:
    answering, asked = network.apps["control-plane"], []

    async def notes(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            asked.append(clock.monotonic() - came)
        await answering(scope, receive, send)

    network.apps["control-plane"], came = notes, clock.monotonic()
    async with network.routed(capacity_seconds=5) as client:
        error = error_of(await client.post(COMPLETIONS, json=ASKED), 503, "no-capacity")
        assert clock.monotonic() - came == pytest.approx(5)
    assert len(asked) == 2
    assert "no instance of model 'llama' is registered" in error["message"]


async def test_workers_that_join_while_a_request_waits_serve_it(
    network, control_plane, clock
) -> None:
    async with network.routed(capacity_seconds=5) as client:
        request = asyncio.create_task(client.post(COMPLETIONS, json=ASKED))
        await passes(4)
        assert not request.done()
        await network.join("p", Role.PREFILL, PREFILLS)
        await network.join("d", Role.DECODE, DECODES)
        came = clock.monotonic()
        assert (await request).status_code == 200
        assert clock.monotonic() - came <= 0.2


async def test_a_model_that_no_worker_serves_is_not_found(client, asked) -> None:
    error = error_of(
        await client.post(COMPLETIONS, json={**ASKED, "model": "qwen"}), 404, "model_not_found"
    )
    assert error["param"] == "model"
    assert error["message"] == "The model `qwen` does not exist. Valid aliases: llama."


async def test_other_paths_and_methods_are_refused_in_the_same_shape(client) -> None:
    error_of(await client.get("/v1/nothing"), 404, "not-found")
    assert (
        "use POST" in error_of(await client.get(COMPLETIONS), 405, "method-not-allowed")["message"]
    )


async def test_without_a_control_plane_the_router_is_not_ready(network, clock) -> None:
    async with network.routed(deadline=0.3, capacity_seconds=0.2) as client:
        assert (await client.get("/healthz")).status_code == 200
        error_of(await client.get("/readyz"), 503, "control-plane-unavailable")
        asked_at = clock.monotonic()
        answer = await client.post(COMPLETIONS, json=ASKED)
        # 0.05 s to find a worker that tokenizes, then the wait for a pair.
        assert clock.monotonic() - asked_at <= 0.05 + 0.2
        error_of(answer, 503, "control-plane-unavailable")
        assert answer.headers["retry-after"] == "1"


async def test_requests_above_the_bound_are_refused(network, control_plane) -> None:
    came, go_on = asyncio.Event(), asyncio.Event()

    async def waits(body: dict[str, Any], reply: Reply) -> None:
        came.set()
        await go_on.wait()
        await DECODES(body, reply)

    await network.join("p", Role.PREFILL, PREFILLS)
    await network.join("d", Role.DECODE, waits)
    async with network.routed(max_requests=1) as client:
        first = asyncio.create_task(client.post(COMPLETIONS, json=ASKED))
        await came.wait()
        error_of(await client.post(COMPLETIONS, json=ASKED), 503, "overloaded")
        go_on.set()
        assert (await first).status_code == 200


async def test_clients_need_an_api_key(network, asked, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who\nalice 0123456789abcdef0123\n")
    async with network.routed(api_keys=watch_api_keys(keys)) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}):
            for answer in (
                await client.post(COMPLETIONS, json=ASKED, headers=headers),
                await client.post(CHAT, json=CHATTED, headers=headers),
                await client.get("/v1/models", headers=headers),
            ):
                error_of(answer, 401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        headers = {"Authorization": "Bearer 0123456789abcdef0123"}
        answer = await client.post(COMPLETIONS, json=ASKED, headers=headers)
        assert answer.status_code == 200
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(("scope", "status"), [("router", 200), ("worker", 502)])
async def test_the_routers_token_needs_the_scope_router(
    network, tmp_path: Path, scope: str, status: int
) -> None:
    token, joining = "0123456789abcdef0123", "abcdef01234567890123"
    tokens = tmp_path / "tokens"
    tokens.write_text(f"edge {scope} {token}\nnode worker {joining}\n")
    joins = Credentials(token=joining)
    async with network.control_plane(lease_seconds=600, tokens=watch_tokens(tokens)):
        await network.join("p", Role.PREFILL, PREFILLS, joins)
        await network.join("d", Role.DECODE, DECODES, joins)
        async with network.routed(credentials=Credentials(token=token)) as client:
            answer = await client.post(COMPLETIONS, json=ASKED)
    assert answer.status_code == status
    if status == 502:
        error = error_of(answer, 502, "forbidden")
        assert "the control plane refuses this router" in error["message"]
        assert token not in answer.text
