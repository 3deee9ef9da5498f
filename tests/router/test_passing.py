"""Requests and answers pass the router unchanged, but for what it takes from prefill's answer."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx2
import pytest

from kvxfer.instances import Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.web.answer import DONE, data_event
from tests.network import Network, Reply
from tests.virtual_time import VirtualClock, passes

from .servers import (
    DECODES,
    PREFILLS,
    USAGE,
    answers,
    chat_chunk,
    chunk,
    either,
    problem,
    whole,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "llama", "prompt": "hi"},
    CHAT: {"model": "llama", "messages": SAID},
    RESPONSES: {"model": "llama", "input": "hi"},
    MESSAGES: {"model": "llama", "messages": SAID, "max_tokens": 9},
}
EVENTS = "text/event-stream; charset=utf-8"
JSON = "application/json"


class Workers:
    """A prefill and a decode worker that keep their requests, and answer as the test sets."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.asked: list[tuple[str, str, bytes]] = []
        self.prefills = PREFILLS
        self.decodes = DECODES

    async def join(self, **changes: Any) -> None:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):

            async def noted(body: dict[str, Any], reply: Reply, name: str = name) -> None:
                self.asked.append((name, reply.path, reply.content))
                await (self.prefills if name == "p" else self.decodes)(body, reply)

            others = {"/tokenize": noted}
            await self._network.join(name, role, noted, others=others, **changes)

    @property
    def names(self) -> str:
        """The workers that were asked, in no order."""
        return "".join(sorted(name for name, _, _ in self.asked))

    def body(self, name: str) -> dict[str, Any]:
        """Returns the body of the last request to a worker."""
        found: dict[str, Any] = json.loads([body for who, _, body in self.asked if who == name][-1])
        return found


@pytest.fixture
async def workers(network: Network, control_plane: EmbeddedRegistry) -> Workers:
    made = Workers(network)
    await made.join(aggregates=True)
    return made


async def ask(network: Network, path: str, **more: Any) -> httpx2.Response:
    async with network.routed() as client:
        return await client.post(path, json={**ASKED[path], **more})


# --- requests --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "member",
    [
        b'"seed": 16.0',
        b'"seed": 100000000000000000000000000000000000000001',
        b'"user": "\\u00e9\\/ \\ud83d\\ude00"',
        b'"nested": { "a" : [1, 2.50, null ] }',
    ],
)
async def test_decode_gets_the_members_byte_for_byte(
    network: Network, workers: Workers, path: str, member: bytes
) -> None:
    content = json.dumps(ASKED[path]).encode()[:-1] + b", " + member + b"}"
    async with network.routed() as client:
        assert (await client.post(path, content=content)).status_code == 200
    [sent] = [body for name, _, body in workers.asked if name == "d"]
    assert member.partition(b": ")[2] in sent
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    assert (workers.body("p")[limit], workers.body("p")["stream"]) == (1, False)


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "llama", "prompt": "hi", "top_p": NaN, "temperature": -Infinity}',
        b'{"model": "llama", "prompt": "\\ud800"}',
        b'{"model": "llama", "prompt": "hi", "\\ud800": 1}',
    ],
)
async def test_json_that_only_python_reads_reaches_both_workers(
    network: Network, workers: Workers, content: bytes
) -> None:
    async with network.routed() as client:
        assert (await client.post(COMPLETIONS, content=content)).status_code == 200
    assert workers.names == "dp"
    assert str(workers.body("d")["prompt"]) == json.loads(content)["prompt"]


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"", JSON),
        (b"{", JSON),
        (b"[1]", JSON),
        (b"\xff", JSON),
        (b'{"model": "llama", "prompt": "hi"}', "text/plain"),
        (b"{}", JSON),
        (b'{"model": "llama", "prompt":  null}', JSON),
    ],
)
async def test_one_worker_refuses_a_body_without_a_prompt(
    network: Network, workers: Workers, content: bytes, content_type: str
) -> None:
    refusal = answers(400, JSON, b'{"error": {"message": "no object", "code": 400}}')
    workers.prefills = workers.decodes = refusal
    async with network.routed() as client:
        headers = {"Content-Type": content_type}
        answer = await client.post(COMPLETIONS, content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no object")
    assert [sent for _, _, sent in workers.asked] == [content]


ALONE = [
    (COMPLETIONS, {"prompt": ["a", "b"]}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]]}),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}),
    (COMPLETIONS, {"max_tokens": 0, "echo": True}),
    (COMPLETIONS, {"echo": True, "logprobs": 0}),
    (COMPLETIONS, {"use_beam_search": True, "n": 2}),
    (CHAT, {"use_beam_search": True, "n": 2}),
    (CHAT, {"echo": True}),
    (RESPONSES, {"background": True}),
    (RESPONSES, {"previous_response_id": "resp_1"}),
    (RESPONSES, {"tools": [{"type": "code_interpreter"}]}),
]
PAIRED = [
    (COMPLETIONS, {"prompt": ["a"]}),
    (COMPLETIONS, {"prompt": [[1, 2]]}),
    (COMPLETIONS, {"prompt": [1, 2]}),
    (COMPLETIONS, {"max_tokens": 16.0, "echo": True}),
    (COMPLETIONS, {"logprobs": 0, "n": 2, "use_beam_search": False}),
    (
        COMPLETIONS,
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    (CHAT, {"n": 2, "logprobs": True, "echo": False}),
    (RESPONSES, {"tools": [{"type": "function", "name": "f"}], "store": True}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}]}),
]


@pytest.mark.parametrize("path", ASKED)
async def test_prefill_of_messages_learns_that_its_limit_is_not_the_clients(
    network: Network, workers: Workers, path: str
) -> None:
    """Otherwise vLLM refuses a thinking budget of more than one token."""
    await ask(network, path)
    prefill, decode = (workers.body(name)["kv_transfer_params"] for name in "pd")
    assert prefill.pop("do_remote_decode", False) is (path == MESSAGES)
    assert decode.pop("do_remote_prefill") is True
    assert prefill == decode


@pytest.mark.parametrize(("path", "more"), ALONE)
async def test_what_a_pair_cannot_compute_goes_unchanged_to_one_worker(
    network: Network, workers: Workers, control_plane: EmbeddedRegistry, path: str, more: Any
) -> None:
    assert (await ask(network, path, **more)).status_code == 200
    [(_, asked, content)] = workers.asked
    assert (asked, json.loads(content)) == (path, {**ASKED[path], **more})
    await passes(0.01)
    assert not await control_plane.transfers()


@pytest.mark.parametrize(("path", "more"), PAIRED)
async def test_all_else_is_served_by_a_pair(
    network: Network, workers: Workers, path: str, more: Any
) -> None:
    assert (await ask(network, path, **more)).status_code == 200
    assert workers.names == "dp"
    sent = workers.body("d")
    assert sent.pop("kv_transfer_params")["ticket"]
    assert sent == {**ASKED[path], **more}


async def test_the_error_of_a_fleet_of_pairs_says_what_it_cannot_compute(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    workers = Workers(network)
    await workers.join()
    answer = await ask(network, COMPLETIONS, prompt=["a", "b"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not-aggregating")
    assert answer.json()["error"]["message"].startswith("prompt: a pair of workers cannot compute")
    assert answer.json()["error"]["param"] == "prompt"
    assert not workers.asked


@pytest.mark.parametrize(("content", "lacks"), [(b"[1]", "body"), (b"{}", "prompt")])
async def test_a_fleet_of_pairs_refuses_a_body_without_a_prompt(
    network: Network, control_plane: EmbeddedRegistry, content: bytes, lacks: str
) -> None:
    workers = Workers(network)
    await workers.join()
    async with network.routed() as client:
        answer = await client.post(COMPLETIONS, content=content, headers={"Content-Type": JSON})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, lacks)
    assert not workers.asked


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(
            ("POST", path)
            for path in (
                *("/tokenize", "/detokenize", "/v1/embeddings", "/v1/rerank", "/v1/score"),
                *("/v1/messages/count_tokens", "/v1/responses/resp_1/cancel"),
            )
        ),
        ("GET", "/version"),
        ("GET", "/v1/responses/resp_1?stream=true"),
    ],
)
async def test_routes_without_a_cache_go_to_one_worker(
    network: Network, workers: Workers, method: str, path: str
) -> None:
    async def tells(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, JSON)
        await reply.write(b'{"told":  1}')

    workers.prefills = workers.decodes = tells
    body = {"model": "llama", "input": "hi"} if method == "POST" else None
    async with network.routed() as client:
        answer = await client.request(method, path, json=body)
    assert (answer.status_code, answer.content) == (200, b'{"told":  1}')
    [(_, asked, content)] = workers.asked
    assert asked == path.partition("?")[0]
    assert (json.loads(content) if content else None) == body


async def test_a_request_id_in_the_body_names_the_request(
    network: Network, workers: Workers
) -> None:
    got: list[str] = []

    async def noted(body: dict[str, Any], reply: Reply) -> None:
        got.append(reply.headers["x-request-id"])
        await DECODES(body, reply)

    workers.decodes = noted
    async with network.routed() as client:
        for headers in ({}, {"X-Request-ID": "by-header"}):
            body = {**ASKED[COMPLETIONS], "request_id": "by-body"}
            answer = await client.post(COMPLETIONS, json=body, headers=headers)
            got.append(answer.headers["x-request-id"])
        body = {**ASKED[COMPLETIONS], "request_id": "two\nlines"}
        assert "\n" not in (await client.post(COMPLETIONS, json=body)).headers["x-request-id"]
    assert got[:4] == ["by-body", "by-body", "by-header", "by-header"]


# --- answers ---------------------------------------------------------------------------------

STREAM = (
    b": begins\n\n"
    + chat_chunk(role="assistant", content="")
    + b": keep-alive\n\n"
    + b'data: {"choices": [{"index":0, "delta" : {"content":"\\u00e9"}}],"mine": 1.50}\n\n'
    # Name and first arguments of one tool call, as two entries.
    + chat_chunk(
        tool_calls=[
            {"index": 0, "id": "ls:0", "type": "function", "function": {"name": "ls"}},
            {"index": 0, "function": {"arguments": '{"'}},
        ]
    )
    # Usage in each chunk, as with continuous_usage_stats.
    + data_event({"choices": [], "usage": {**USAGE, "prompt_tokens_details": None}})
    + b"event: odd\r\ndata: 1\r\n\r\n"
    + DONE
)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_stream_is_passed_on_byte_for_byte(
    network: Network, workers: Workers, size: int
) -> None:
    async def streams(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, EVENTS, x_load="3", server="uvicorn")
        for at in range(0, len(STREAM), size):
            await reply.write(STREAM[at : at + size])

    workers.decodes = streams
    answer = await ask(network, CHAT, stream=True)
    assert answer.content == STREAM
    assert (answer.headers["content-type"], answer.headers["cache-control"]) == (EVENTS, "no-cache")
    assert answer.headers["x-load"] == "3"
    assert "server" not in answer.headers


async def test_half_an_event_never_reaches_the_client(network: Network, workers: Workers) -> None:
    workers.decodes = answers(200, EVENTS, chunk("a") + b'data: {"choices": [')
    answer = await ask(network, COMPLETIONS, stream=True)
    first, last = answer.content.strip().split(b"\n\n")
    assert first + b"\n\n" == chunk("a")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "peer-lost"


async def test_bytes_are_activity_and_comments_reach_the_client(
    network: Network, workers: Workers, clock: VirtualClock
) -> None:
    """A model that reasons in silence, before and after its first token."""
    seen: list[float] = []

    async def reasons(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, EVENTS)
        for part in (chat_chunk(role="assistant", content=""), chat_chunk("stop", content="so")):
            for _ in range(20):
                await passes(0.2)
                await reply.write(b": keep-alive\n\n")
            await reply.write(part)
        await reply.write(DONE)

    workers.decodes = reasons
    async with (
        network.routed(token_seconds=1) as client,
        client.stream("POST", CHAT, json={**ASKED[CHAT], "stream": True}) as answer,
    ):
        began, content = clock.monotonic(), b""
        async for part in answer.aiter_raw():
            seen.append(clock.monotonic() - began)
            content += part
    assert content.count(b": keep-alive\n\n") == 40
    assert content.endswith(chat_chunk("stop", content="so") + DONE)
    assert max(after - before for before, after in itertools.pairwise(seen)) < 0.25


async def test_comments_do_not_prevent_a_retry_on_another_pair(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    async def comments_and_fails(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, EVENTS)
        await reply.write(b": keep-alive\n\n")

    await network.join("p", Role.PREFILL, PREFILLS)
    await network.join("d1", Role.DECODE, comments_and_fails)
    await network.join("d2", Role.DECODE, DECODES)
    answer = await ask(network, COMPLETIONS, stream=True)
    assert answer.content.startswith(b": keep-alive\n\n" + chunk("a"))
    assert answer.content.endswith(DONE)


async def test_an_error_after_a_comment_is_sent_in_the_stream(
    network: Network, workers: Workers
) -> None:
    async def comments_and_refuses(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, EVENTS)
        await reply.write(b": keep-alive\n\n")
        await reply.write(b'data: {"error": {"code": "ticket-invalid", "message": "no"}}\n\n')

    workers.decodes = comments_and_refuses
    async with network.routed(attempts=1) as client:
        answer = await client.post(COMPLETIONS, json={**ASKED[COMPLETIONS], "stream": True})
    assert answer.status_code == 200
    comment, event = answer.content.strip().split(b"\n\n")
    assert comment == b": keep-alive"
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "ticket-invalid"


# --- errors ----------------------------------------------------------------------------------


def told(status: int, message: str = "slow down") -> bytes:
    error = {"message": message, "type": "SomeError", "param": "body.seed", "code": status}
    return json.dumps({"error": error}).encode()


SGLANG = b'{"object": "error", "message": "bad", "type": "BadRequestError", "code": 400}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "content"),
    [*((status, told(status)) for status in (400, 404, 413, 422, 429, 501)), (400, SGLANG)],
)
async def test_a_refusal_is_passed_on_as_it_is_and_tried_once(
    network: Network, workers: Workers, status: int, content: bytes, stream: bool
) -> None:
    async def refuses(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(status, JSON, retry_after="7")
        await reply.write(content)

    workers.prefills = workers.decodes = refuses
    answer = await ask(network, COMPLETIONS, stream=stream)
    assert (answer.status_code, answer.content) == (status, content)
    assert answer.headers["retry-after"] == "7"
    assert workers.names == "dp"


async def test_the_refusal_of_decode_is_preferred_to_that_of_prefill(
    network: Network, workers: Workers
) -> None:
    """Prefill refuses first, but it was asked for one token only."""

    async def refuses_later(body: dict[str, Any], reply: Reply) -> None:
        await passes(0.3)
        await answers(400, JSON, told(400, "of decode"))(body, reply)

    workers.prefills = answers(400, JSON, told(400, "of prefill"))
    workers.decodes = refuses_later
    assert (await ask(network, COMPLETIONS)).json()["error"]["message"] == "of decode"

    async def waits(_body: dict[str, Any], _reply: Reply) -> None:
        await asyncio.Event().wait()

    workers.decodes = waits
    assert (await ask(network, COMPLETIONS)).json()["error"]["message"] == "of prefill"


@pytest.mark.parametrize(
    ("status", "asked"), [(500, 2), (502, 4), (503, 4), (504, 4), (507, 2), (429, 1)]
)
async def test_the_status_of_an_error_decides_how_often_other_workers_are_tried(
    network: Network, workers: Workers, status: int, asked: int
) -> None:
    async def fails(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(status, JSON, retry_after="3")
        await reply.write(told(status))

    workers.decodes = fails
    answer = await ask(network, COMPLETIONS)
    assert workers.names.count("d") == asked
    assert (answer.status_code, answer.content) == (status, told(status))
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("status", [401, 403])
async def test_a_worker_that_refuses_the_routers_key_gives_a_502(
    network: Network, workers: Workers, status: int
) -> None:
    workers.decodes = workers.prefills = answers(status, JSON, b'{"error": "Unauthorized"}')
    answer = await ask(network, COMPLETIONS)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (502, "worker-key-refused")
    assert "--worker-key-file" in error["message"]
    assert workers.names.count("d") == 1


@pytest.mark.parametrize("code", [400, 422, 501])
async def test_a_refusal_in_a_stream_is_passed_on_and_tried_once(
    network: Network, workers: Workers, code: int
) -> None:
    event = b"data: " + told(code) + b"\n\n"
    workers.prefills = answers(code, JSON, told(code))
    workers.decodes = answers(200, EVENTS, event + DONE)
    answer = await ask(network, COMPLETIONS, stream=True)
    assert (answer.status_code, answer.content) == (200, event + DONE)
    assert workers.names == "dp"


async def test_of_two_refusals_the_client_sees_that_of_decode(
    network: Network, workers: Workers
) -> None:
    workers.prefills = answers(400, JSON, told(400))
    workers.decodes = answers(422, JSON, told(422))
    answer = await ask(network, COMPLETIONS)
    assert (answer.status_code, answer.content) == (422, told(422))


@pytest.mark.parametrize(("code", "asked"), [(500, 2), (503, 4)])
async def test_another_error_before_the_first_token_is_tried_elsewhere_and_then_passed_on(
    network: Network, workers: Workers, code: int, asked: int
) -> None:
    stream = b"data: " + told(code) + b"\n\n" + DONE
    workers.decodes = answers(200, EVENTS, stream)
    answer = await ask(network, COMPLETIONS, stream=True)
    assert (answer.status_code, answer.content) == (200, stream)
    assert workers.names.count("d") == asked


async def test_an_error_after_the_first_token_is_passed_on_and_counted(
    network: Network, workers: Workers
) -> None:
    stream = chunk("a") + b"data: " + told(500) + b"\n\n" + DONE
    workers.decodes = answers(200, EVENTS, stream)
    async with network.routed() as client:
        answer = await client.post(COMPLETIONS, json={**ASKED[COMPLETIONS], "stream": True})
        assert answer.content == stream
        metrics = (await client.get("/metrics")).text
    assert 'kvxfer_router_failed_streams_total{code="worker-error"} 1.0' in metrics


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (COMPLETIONS, b'data: {"error": {"message": "'),
        (RESPONSES, b'event: error\ndata: {"type": "error", "code": "peer-timeout", "message": "'),
        (MESSAGES, b'event: error\ndata: {"type": "error", "error": {"type": "server_error", "'),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_of_its_api(
    network: Network, workers: Workers, path: str, event: bytes
) -> None:
    async def breaks_off(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, EVENTS)
        await reply.write(chunk("a"))
        await asyncio.Event().wait()

    workers.decodes = breaks_off
    async with network.routed(token_seconds=5) as client:
        answer = await client.post(path, json={**ASKED[path], "stream": True})
    first, _, last = answer.content.partition(b"\n\n")
    assert first + b"\n\n" == chunk("a")
    assert last.startswith(event)


async def test_errors_of_the_router_have_the_shape_of_the_api(
    network: Network, workers: Workers
) -> None:
    answer = await ask(network, MESSAGES, model="qwen")
    assert (answer.status_code, answer.json()) == (
        404,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "The model `qwen` does not exist. Valid aliases: llama.",
            },
        },
    )


# --- prefill's knowledge of the prompt -------------------------------------------------------


def with_cached(cached: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"usage": {**USAGE, "prompt_tokens_details": details}}


ONE = {"text": "ab", "finish_reason": "stop", "prompt_logprobs": None}


async def test_cached_tokens_are_those_of_prefill(network: Network, workers: Workers) -> None:
    workers.prefills = answers(200, JSON, whole("text_completion", ONE, **with_cached(128)))
    usage = data_event({"choices": [], **with_cached(200)})
    one_piece = whole("text_completion", ONE, **with_cached(200))
    workers.decodes = either(chunk("a") + usage + DONE, one_piece)
    assert (await ask(network, COMPLETIONS)).json() == {
        **json.loads(one_piece),
        **with_cached(128),
    }
    answer = await ask(network, COMPLETIONS, stream=True)
    assert answer.content == chunk("a") + data_event({"choices": [], **with_cached(128)}) + DONE


async def test_an_answer_whose_prefill_is_lost_reports_no_cached_tokens(
    network: Network, workers: Workers
) -> None:
    async def hangs_up_later(_body: dict[str, Any], _reply: Reply) -> None:
        await passes(0.5)

    async def decodes_later(body: dict[str, Any], reply: Reply) -> None:
        await answers(200, EVENTS, chunk("a"))(body, reply)
        await passes(1)
        await reply.write(data_event({"choices": [], **with_cached(200)}) + DONE)

    workers.prefills, workers.decodes = hangs_up_later, decodes_later
    answer = await ask(network, COMPLETIONS, stream=True)
    assert answer.content == chunk("a") + data_event({"choices": [], **with_cached(None)}) + DONE


RESPONSES_USAGE = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}
MESSAGES_USAGE = {
    "input_tokens": 5,
    "output_tokens": 1,
    "cache_creation_input_tokens": 2,
    "cache_read_input_tokens": 4,
}


@pytest.mark.parametrize(
    ("path", "of_prefill", "of_decode", "expected"),
    [
        (
            RESPONSES,
            {"usage": RESPONSES_USAGE},
            {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}}},
            {"usage": RESPONSES_USAGE},
        ),
        (
            MESSAGES,
            {"usage": MESSAGES_USAGE},
            {
                "usage": {
                    "input_tokens": 1,
                    "output_tokens": 7,
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": 8,
                }
            },
            {"usage": {**MESSAGES_USAGE, "output_tokens": 7}},
        ),
    ],
)
async def test_other_apis_report_cached_tokens_in_their_own_members(
    network: Network, workers: Workers, path: str, of_prefill: Any, of_decode: Any, expected: Any
) -> None:
    workers.prefills = answers(200, JSON, json.dumps(of_prefill).encode())
    event = {"type": "message_delta", **of_decode}
    wanted = {"type": "message_delta", **expected}
    if path == RESPONSES:
        event, wanted = {"response": of_decode}, {"response": expected}
    stream = b"event: end\n" + data_event(event)
    workers.decodes = either(stream, json.dumps(of_decode, separators=(",", ":")).encode())
    assert (await ask(network, path)).json() == expected
    answer = await ask(network, path, stream=True)
    assert answer.content == b"event: end\n" + data_event(wanted)


LOGPROBS = [None, {"7": {"logprob": -0.25, "rank": 1, "decoded_token": "a"}}]


@pytest.mark.parametrize("asked", [0, 1, 2.0, -1])
async def test_logprobs_of_the_prompt_are_those_of_prefill(
    network: Network, workers: Workers, asked: float
) -> None:
    workers.prefills = answers(
        200, JSON, whole("text_completion", {**ONE, "prompt_logprobs": LOGPROBS})
    )
    workers.decodes = answers(200, JSON, whole("text_completion", ONE))
    answer = await ask(network, COMPLETIONS, prompt_logprobs=asked)
    assert [choice["prompt_logprobs"] for choice in answer.json()["choices"]] == [LOGPROBS]
    assert "prompt_logprobs" not in workers.body("d")
    assert workers.body("p")["prompt_logprobs"] == asked

    workers.prefills = answers(200, JSON, whole("chat.completion", {}, prompt_logprobs=LOGPROBS))
    workers.decodes = answers(200, JSON, whole("chat.completion", {}, prompt_logprobs=None))
    answer = await ask(network, CHAT, prompt_logprobs=asked)
    assert answer.json()["prompt_logprobs"] == LOGPROBS


async def test_one_worker_computes_logprobs_if_prefill_has_only_a_part_of_them(
    network: Network, workers: Workers
) -> None:
    usage = {**USAGE, "prompt_tokens": len(LOGPROBS) + 1}
    content = whole("text_completion", {**ONE, "prompt_logprobs": LOGPROBS}, usage=usage)
    workers.prefills = workers.decodes = answers(200, JSON, content)
    answer = await ask(network, COMPLETIONS, prompt_logprobs=1)
    assert answer.status_code == 200
    *_, (_, _, last) = workers.asked
    assert json.loads(last) == {**ASKED[COMPLETIONS], "prompt_logprobs": 1}


@pytest.mark.parametrize("wrong", ["1", -2, 1.5, True])
async def test_decode_refuses_a_wrong_number_of_prompt_logprobs(
    network: Network, workers: Workers, wrong: Any
) -> None:
    await ask(network, COMPLETIONS, prompt_logprobs=wrong)
    assert workers.body("d")["prompt_logprobs"] == wrong


async def test_decode_refuses_a_stream_with_prompt_logprobs(
    network: Network, workers: Workers
) -> None:
    await ask(network, COMPLETIONS, prompt_logprobs=1, stream=True)
    assert workers.body("d")["prompt_logprobs"] == 1


# --- web pages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((), None), (("https://ui.example",), "https://ui.example"), (("*",), "*")],
)
async def test_pages_of_other_origins_need_permission(
    network: Network, workers: Workers, origins: tuple[str, ...], allowed: str | None
) -> None:
    headers = {"Origin": "https://ui.example"}
    asks = {**headers, "Access-Control-Request-Method": "POST"}
    async with network.routed(allowed_origins=origins) as client:
        preflight = await client.options(COMPLETIONS, headers=asks)
        answer = await client.post(COMPLETIONS, json=ASKED[COMPLETIONS], headers=headers)
    assert preflight.headers.get("access-control-allow-origin") == allowed
    assert preflight.is_success is (allowed is not None)
    assert answer.headers.get("access-control-allow-origin") == allowed


async def test_kvxfers_own_errors_keep_their_names(network: Network, workers: Workers) -> None:
    workers.decodes = problem(403, "ticket-invalid")
    async with network.routed(attempts=2) as client:
        answer = await client.post(COMPLETIONS, json=ASKED[COMPLETIONS])
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "ticket-invalid")
    assert workers.names.count("d") == 2
