"""A worker's HTTP API: answers, problem documents, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from kvxfer.event_stream import EventParser
from kvxfer.reference.worker.app import make_app
from kvxfer.reference.worker.completions import CompletionRequest
from verify.polling import eventually

from .workers import BLOCKS, WorkerPair, single_process

BROKERED = {
    "ticket": "x",
    "prefill_engine_address": "kvx://h:1/a",
    "handshake": "brokered",
}

pytestmark = [
    pytest.mark.native,
    pytest.mark.parametrize("workers", ["local"], indirect=True),
]


@pytest.fixture
def clients(workers: WorkerPair) -> tuple[httpx2.AsyncClient, httpx2.AsyncClient]:
    """A client of the prefill worker and one of the decode worker."""
    prefill, decode = (
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(make_app(worker.service)), base_url="http://worker"
        )
        for worker in (workers.prefill, workers.decode)
    )
    return prefill, decode


async def test_a_completion_goes_through_both_workers(
    workers: WorkerPair, clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient]
) -> None:
    body = workers.request("over HTTP", max_tokens=5).model_dump()
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json=body) for client in clients)
    )
    assert [answer.status_code for answer in answers] == [200, 200]
    prefill, decode = (answer.json() for answer in answers)
    expected = single_process().generate("over HTTP", 5)
    assert prefill["choices"][0]["token_ids"] == expected[:1]
    assert decode["choices"][0]["token_ids"] == expected
    assert decode["object"] == "text_completion"
    assert decode["model"] == "tiny"
    assert prefill["weights_version"] == decode["weights_version"] == 0
    assert decode["weights_versions"] == [{"version": 0, "first": 0, "tokens": 5}]
    assert prefill["transfer"]["bytes"] > 0
    assert set(decode["timings"]) == {"prefill", "visible_transfer", "first_token", "decode"}


async def test_another_version_than_the_served_one_is_refused(
    workers: WorkerPair, clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient]
) -> None:
    body = workers.request("over HTTP", max_tokens=2, weights_version=3).model_dump()
    for client in clients:
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "wrong-version")
        assert "demands version 3 of the weights and 0 is served" in answer.json()["detail"]
    body["weights_version"] = 0
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json=body) for client in clients)
    )
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_metrics_report_what_moved_and_what_was_refused(
    workers: WorkerPair, clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient]
) -> None:
    prefill, decode = clients
    body = workers.request("over HTTP", max_tokens=2).model_dump()
    await asyncio.gather(*(client.post("/v1/completions", json=body) for client in clients))
    body["kv_transfer_params"]["ticket"] = "forged"
    forged = await prefill.post("/v1/completions", json=body)
    assert forged.json()["code"] == "ticket-invalid"
    text = (await prefill.get("/metrics")).text.splitlines()
    assert "kvxfer_engine_peers 1.0" in text
    assert 'kvxfer_refused_total{code="ticket-invalid",what="ticket"} 1.0' in text
    sent = next(line for line in text if 'kvxfer_engine_bytes_total{direction="sent"}' in line)
    received = (await decode.get("/metrics")).text
    assert sent.replace("sent", "received") in received.splitlines()


async def test_metrics_report_how_transfers_ended_and_which_peer_was_lost(
    workers: WorkerPair, clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient]
) -> None:
    prefill, decode = clients
    body = workers.request("over HTTP", max_tokens=2).model_dump()
    await asyncio.gather(*(client.post("/v1/completions", json=body) for client in clients))
    nobody = workers.request("over HTTP", max_tokens=2).model_dump()
    gone = "kvx://127.0.0.1:9/" + "0" * 32
    nobody["kv_transfer_params"]["prefill_engine_address"] = gone
    assert (await decode.post("/v1/completions", json=nobody)).status_code == 502
    sent, received = [
        (await client.get("/metrics")).text.splitlines() for client in (prefill, decode)
    ]
    assert 'kvxfer_kv_transfers_total{direction="send",outcome="delivered"} 1.0' in sent
    for outcome, times in ("delivered", 1), ("connect-failed", 1), ("checksum-mismatch", 0):
        line = f'kvxfer_kv_transfers_total{{direction="receive",outcome="{outcome}"}} {times}.0'
        assert line in received
    moved = next(line for line in sent if line.startswith("kvxfer_kv_transfer_bytes_total{"))
    assert 'fabric="local"' in moved
    assert float(moved.split()[1]) > 0
    assert moved.replace("send", "receive") in received
    assert 'kvxfer_kv_transfer_seconds_bucket{direction="receive",le="+Inf"} 1.0' in received
    assert 'kvxfer_kv_transfer_seconds_count{direction="receive"} 1.0' in received
    assert 'kvxfer_kv_transfers_running{direction="receive"} 0.0' in received
    assert f'kvxfer_kv_blocks{{state="free"}} {BLOCKS}.0' in received
    assert 'kvxfer_peers_lost_total{code="peer-lost"} 0.0' in received
    await workers.prefill.engine.close()
    await eventually(
        lambda: (
            'kvxfer_peers_lost_total{code="peer-lost"} 1.0'
            in workers.decode.service.metrics().decode()
        )
    )


@pytest.mark.parametrize("with_usage", [False, True])
async def test_decode_streams_a_token_per_event(
    with_usage: bool,
    workers: WorkerPair,
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    body = workers.request("over HTTP", max_tokens=20).model_dump()
    streamed = body | {"stream": True, "stream_options": {"include_usage": with_usage}}
    _, answer = await asyncio.gather(
        clients[0].post("/v1/completions", json=body),
        clients[1].post("/v1/completions", json=streamed),
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = [event.data for event in EventParser().feed(answer.content)]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    if with_usage:
        end = chunks.pop()
        assert end["choices"] == []
        assert end["usage"] == {"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29}
        assert set(end["timings"]) == {"prefill", "visible_transfer", "first_token", "decode"}
    single = single_process()
    expected = single.generate("over HTTP", 20)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[token] for token in expected]
    assert "".join(choice["text"] for choice in choices) == single.tokenizer.decode(expected)
    assert [choice["finish_reason"] for choice in choices] == [None] * 19 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert workers.all_blocks_free()


def chat_of(request: CompletionRequest) -> dict[str, Any]:
    """Returns the request as a chat of two messages, without its prompt."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    return request.model_dump(exclude={"prompt"}) | {"messages": messages}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_becomes_one_prompt(
    stream: bool, workers: WorkerPair, clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient]
) -> None:
    body = chat_of(workers.request("", max_tokens=20)) | {"max_completion_tokens": 5}
    _, answer = await asyncio.gather(
        clients[0].post("/v1/chat/completions", json=body),
        clients[1].post("/v1/chat/completions", json={**body, "stream": stream}),
    )
    single = single_process()
    tokens = single.generate("<|system|>\nBe brief.\n<|user|>\nhi\n<|assistant|>\n", 5)
    expected = single.tokenizer.decode(tokens)
    if stream:
        *events, done = [event.data for event in EventParser().feed(answer.content)]
        assert done == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * 4]
        assert "".join(delta["content"] for delta in deltas) == expected
    else:
        assert answer.json()["object"] == "chat.completion"
        [choice] = answer.json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": expected}
    assert workers.all_blocks_free()


@pytest.mark.parametrize(
    ("messages", "detail"),
    [
        ([], "messages: "),
        ([{"role": "x", "content": ""}], "messages.0.role: "),
        ([{"role": "user"}], "messages.0.content: "),
    ],
)
async def test_a_chat_that_cannot_be_read_gets_a_problem_document(
    messages: list[Any],
    detail: str,
    workers: WorkerPair,
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    body = chat_of(workers.request("")) | {"messages": messages}
    for client in clients:
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-argument")
        assert detail in answer.json()["detail"]


async def test_an_error_before_the_first_token_is_not_streamed(
    workers: WorkerPair, clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient]
) -> None:
    body = workers.request("x", stream=True).model_dump()
    with workers.decode.pool.hold(BLOCKS):
        answer = await clients[1].post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["code"]) == (503, "block-pool-exhausted")
    answer = await clients[0].post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-argument")
    assert "stream from decode" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, list("hé".encode())),
        ({"model": "tiny", "prompt": "x"}, [ord("x")]),
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            list(b"<|user|>\nhi\n<|assistant|>\n"),
        ),
    ],
)
async def test_tokenize_returns_the_tokens_of_a_prompt(
    body: dict[str, Any],
    tokens: list[int],
    workers: WorkerPair,
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    for client in clients:
        answer = await client.post("/tokenize", json=body)
        limit = workers.prefill.service.runner.config.max_position
        told = {"tokens": tokens, "count": len(tokens), "max_model_len": limit}
        assert answer.json() == told


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "give prompt or messages"),
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            "give prompt or messages",
        ),
        ({"prompt": "x", "tools": []}, "tools: "),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x", "model": "huge"}, "runs the model 'tiny', not 'huge'"),
    ],
)
async def test_a_prompt_that_cannot_be_tokenized_gets_a_problem_document(
    body: dict[str, Any],
    detail: str,
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    answer = await clients[0].post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-argument")
    assert detail in answer.json()["detail"]


async def test_health_counts_blocks_and_requests(
    workers: WorkerPair, clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient]
) -> None:
    with workers.prefill.pool.hold(3):
        answer = await clients[0].get("/healthz")
    assert answer.json() == {
        "status": "ok",
        "role": "prefill",
        "model": "tiny",
        "blocks": BLOCKS,
        "free_blocks": BLOCKS - 3,
        "running": 0,
        "weights_version": 0,
        "weights_address": None,
    }


@pytest.mark.parametrize(
    ("changes", "status", "code", "detail"),
    [
        ({"prompt": [1] * 200}, 422, "prompt-too-long", "does not fit the KV cache"),
        ({"prompt": ""}, 422, "invalid-argument", "the prompt is empty"),
        ({"prompt": 5}, 422, "invalid-argument", "prompt"),
        ({"max_tokens": 0}, 422, "invalid-argument", "max_tokens: "),
        ({"temperature": 0.7}, 422, "invalid-argument", "temperature: "),
        ({"stream": "maybe"}, 422, "invalid-argument", "stream: "),
        ({"best_of": 3}, 422, "invalid-argument", "best_of: "),
        ({"model": "huge"}, 422, "invalid-argument", "not 'huge'"),
        ({"kv_transfer_params": None}, 422, "invalid-argument", "kv_transfer_params: "),
        (
            {"kv_transfer_params": BROKERED},
            422,
            "invalid-argument",
            "brokered handshake needs decode_engine_address",
        ),
        (
            {"kv_transfer_params": {**BROKERED, "decode_engine_address": "kvx://h:1/b"}},
            403,
            "ticket-invalid",
            "ticket",
        ),
        (
            {"kv_transfer_params": {**BROKERED, "handshake": "by pigeon"}},
            422,
            "invalid-argument",
            "kv_transfer_params.handshake: ",
        ),
        (
            {"kv_transfer_params": {"ticket": "x", "prefill_engine_address": "kvx://h:1/a"}},
            403,
            "ticket-invalid",
            "ticket",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_gets_a_problem_document(
    changes: dict[str, Any],
    status: int,
    code: str,
    detail: str,
    workers: WorkerPair,
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    body = workers.request("fine").model_dump() | changes
    for client in clients:
        answer = await client.post("/v1/completions", json=body)
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json"
        assert (answer.status_code, problem["status"]) == (status, status)
        assert (problem["code"], problem["type"]) == (code, f"urn:kvxfer:error:{code}")
        assert detail in problem["detail"]
    assert workers.all_blocks_free()


async def test_a_full_pool_is_a_503(
    workers: WorkerPair, clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient]
) -> None:
    with workers.prefill.pool.hold(BLOCKS):
        answer = await clients[0].post("/v1/completions", json=workers.request("x").model_dump())
    assert (answer.status_code, answer.json()["code"]) == (503, "block-pool-exhausted")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_gives_its_blocks_back(
    stream: bool, workers: WorkerPair
) -> None:
    app = make_app(workers.decode.service)
    asked = workers.request("no one prefills this", stream=stream)
    body = json.dumps(asked.model_dump()).encode()
    left = asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    request = asyncio.create_task(app(scope, receive, send))
    await eventually(lambda: workers.decode.pool.num_free != BLOCKS)
    left.set()
    await request
    assert workers.all_blocks_free()
