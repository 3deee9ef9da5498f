"""Which failures are tried again, on whom, how often; and that a slow client holds decode back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from kvxfer.client import SyncControlPlaneClient
from kvxfer.http_answer import DONE, EventStream
from kvxfer.http_listener import bind, url_of
from kvxfer.instances import BlockUpdate, InstanceState, Role
from kvxfer.prefix_hashes import prompt_hashes
from kvxfer.reference.worker.http_server import HttpServer
from tests.control_plane import RunningControlPlane, worker

from .cluster import until
from .servers import (
    DECODES,
    PREFILLS,
    Answer,
    RunningRouter,
    answers,
    chunk,
    head,
    http_worker,
    problem,
)

ASKED = {"model": "llama", "prompt": "hi"}
EVENTS = "text/event-stream"


@pytest.fixture
def control_plane() -> Iterator[RunningControlPlane]:
    with RunningControlPlane(lease_seconds=600) as running:
        yield running


class Fleet:
    """Workers by id, prefill where it begins with p; `asked` has the ids in the order they were
    asked."""

    def __init__(self, control_plane: RunningControlPlane, **workers: Answer) -> None:
        self.asked: list[str] = []
        self._control_plane = control_plane
        self._workers = workers

    @contextlib.asynccontextmanager
    async def routed(self, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        async with contextlib.AsyncExitStack() as stack:
            for name, answer in self._workers.items():
                role = Role.PREFILL if name.startswith("p") else Role.DECODE
                await stack.enter_async_context(
                    http_worker(self._control_plane.url, name, role, self._noted(name, answer))
                )
            with RunningRouter(self._control_plane.url, **settings) as router:
                async with httpx.AsyncClient(base_url=router.url, timeout=20) as client:
                    yield client

    def _noted(self, name: str, answer: Answer) -> Answer:
        async def noted(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            self.asked.append(name)
            await answer(body, writer)

        return noted


async def test_a_prompt_of_token_ids_goes_where_its_beginning_is_cached(
    control_plane: RunningControlPlane,
) -> None:
    prompt = list(range(1000))
    fleet = Fleet(control_plane, p1=PREFILLS, p2=PREFILLS, d1=DECODES)
    async with fleet.routed() as client:
        with SyncControlPlaneClient(control_plane.url) as workers:
            [p2] = [each for each in workers.instances() if each.instance_id == "p2"]
            cached = BlockUpdate(added=prompt_hashes(prompt[:500], "llama"))
            workers.publish_blocks("p2", p2.epoch, cached)
        for asked in (prompt, "some text", prompt[::-1]):
            await client.post("/v1/completions", json={**ASKED, "prompt": asked})
    assert [name for name in fleet.asked if name.startswith("p")] == ["p2", "p1", "p1"]


async def hangs_up(_body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def waits(_body: dict[str, Any], _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


BREAKS_OFF = answers(200, EVENTS, chunk("a"))
SAYS_ERROR = answers(200, EVENTS, chunk("a") + b'data: {"error": {"code": "transfer-error"}}\n\n')


FAILURES = [
    (hangs_up, "peer-lost"),
    (problem(503, "block-pool-exhausted"), "block-pool-exhausted"),
    (problem(403, "ticket-invalid"), "ticket-invalid"),
    (answers(500, "text/plain", b"oops"), "transfer-error"),
]
STREAM_FAILURES = [
    (answers(200, EVENTS, b""), "peer-lost"),
    (answers(200, EVENTS, b"data: [DONE]\n\n"), "protocol-error"),
    (answers(200, EVENTS, b"data: nonsense\n\n"), "protocol-error"),
]


@pytest.mark.parametrize(
    ("side", "bad", "code"),
    [
        *(("p", *failure) for failure in FAILURES),
        *(("d", *failure) for failure in FAILURES + STREAM_FAILURES),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_another_pair_may_do_better_is_tried_on_another_pair(
    control_plane: RunningControlPlane, bad: Answer, code: str, side: str, stream: bool
) -> None:
    first_failed = asyncio.Event()

    async def prefills_second(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        first_failed.set()
        await PREFILLS(body, writer)

    async def decodes_later(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """It cannot be faster than the failure of a prefill worker."""
        await first_failed.wait()
        await DECODES(body, writer)

    good = prefills_second if side == "p" else DECODES
    other = {"d": decodes_later} if side == "p" else {"p": PREFILLS}
    fleet = Fleet(control_plane, **{f"{side}1": bad, f"{side}2": good}, **other)
    async with fleet.routed() as client:
        answer = await client.post("/v1/completions", json={**ASKED, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert [name for name in fleet.asked if name[0] == side] == [f"{side}1", f"{side}2"]
        metrics = (await client.get("/metrics")).text
    assert f'kvxfer_router_retries_total{{code="{code}"}} 1.0' in metrics
    assert not await control_plane.registry.transfers()


async def test_an_error_about_the_other_side_blames_the_other_side(
    control_plane: RunningControlPlane,
) -> None:
    said: list[str] = []

    async def decode(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        said.append("decode")
        await (DECODES if len(said) > 1 else problem(502, "peer-lost"))(body, writer)

    fleet = Fleet(control_plane, p1=waits, p2=PREFILLS, d1=decode)
    async with fleet.routed() as client:
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
    assert sorted(fleet.asked) == ["d1", "d1", "p1", "p2"]


@pytest.mark.parametrize(
    "bad",
    [
        problem(422, "invalid-argument"),
        answers(400, "application/json", b'{"error": {"message": "this is invalid-argument"}}'),
    ],
)
async def test_what_every_pair_would_refuse_is_tried_once(
    control_plane: RunningControlPlane, bad: Answer
) -> None:
    fleet = Fleet(control_plane, p1=waits, d1=bad, d2=DECODES)
    async with fleet.routed() as client:
        answer = await client.post("/v1/completions", json=ASKED)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "this is invalid-argument"
    assert fleet.asked.count("d1") + fleet.asked.count("d2") == 1


async def test_attempts_are_bounded(control_plane: RunningControlPlane) -> None:
    bad = problem(503, "block-pool-exhausted")
    fleet = Fleet(control_plane, p1=waits, d1=bad, d2=bad, d3=bad, d4=DECODES)
    async with fleet.routed(attempts=3) as client:
        answer = await client.post("/v1/completions", json=ASKED)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert [name for name in fleet.asked if name[0] == "d"] == ["d1", "d2", "d3"]


async def test_no_token_within_the_deadline_is_a_504(control_plane: RunningControlPlane) -> None:
    fleet = Fleet(control_plane, p1=PREFILLS, d1=waits, d2=DECODES)
    async with fleet.routed(first_token_seconds=2) as client:
        answer = await client.post("/v1/completions", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline-exceeded")
    assert not await control_plane.registry.transfers()


@pytest.mark.parametrize(
    ("bad", "code"),
    [(BREAKS_OFF, "peer-lost"), (SAYS_ERROR, "transfer-error"), (None, "peer-timeout")],
)
async def test_after_the_first_token_a_stream_ends_with_an_error_and_an_answer_is_tried_again(
    control_plane: RunningControlPlane, bad: Answer | None, code: str
) -> None:
    async def falls_silent(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await BREAKS_OFF(body, writer)
        await asyncio.sleep(60)

    fleet = Fleet(control_plane, p1=PREFILLS, d1=bad or falls_silent, d2=DECODES)
    async with fleet.routed(token_seconds=0.3) as client:
        answer = await client.post("/v1/completions", json={**ASKED, "stream": True})
        first, last = answer.content.strip().split(b"\n\n")
        assert b'"text":"a"' in first
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
        answer = await client.post("/v1/completions", json=ASKED)
        assert answer.json()["choices"][0]["text"] == "ab"
        metrics = (await client.get("/metrics")).text
    assert f'kvxfer_router_failed_streams_total{{code="{code}"}} 1.0' in metrics


async def test_a_pair_that_comes_after_the_client_has_left_goes_back(
    control_plane: RunningControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = control_plane.registry
    reserve, reserved, answer = registry.reserve, threading.Event(), threading.Event()

    async def reserve_slowly(*arguments: Any, **options: Any) -> None:
        await reserve(*arguments, **options)
        reserved.set()
        await asyncio.to_thread(answer.wait, 20)

    monkeypatch.setattr(registry, "reserve", reserve_slowly)
    fleet = Fleet(control_plane, p1=PREFILLS, d1=DECODES)
    async with fleet.routed(capacity_seconds=10) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        assert await asyncio.to_thread(reserved.wait, 20)
        assert len(await registry.transfers()) == 1
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        metrics, transfers = client.base_url.join("/metrics"), f"{control_plane.url}/v1/transfers"
        await until(lambda: "aborted_total 1.0" in httpx.get(metrics).text)
        answer.set()
        await until(lambda: httpx.get(transfers).json() == {"transfers": []})
    assert fleet.asked == []


async def test_connections_to_workers_are_kept(control_plane: RunningControlPlane) -> None:
    """Over the real server of a worker: an answer that is not read to its end costs one."""
    connections: set[Any] = set()
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        connections.add(request.client)
        if not (await request.json())["stream"]:
            return Response(b"{}")

        async def events() -> AsyncGenerator[bytes, None]:
            for event in (chunk("a", "stop"), DONE):
                yield event

        return EventStream(events())

    with bind("127.0.0.1", 0) as listener:
        server = HttpServer(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with Fleet(control_plane).routed() as client:
            for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
                spec = worker(name, role, http_address=url_of(listener))
                with SyncControlPlaneClient(control_plane.url) as registering:
                    registering.register(spec, state=InstanceState.READY)
            for stream in (True, False) * 3:
                answer = await client.post("/v1/completions", json={**ASKED, "stream": stream})
                assert answer.status_code == 200
        server.should_exit = True
        await serving
    assert len(connections) == 2


class Endless:
    """A decode worker whose stream has no end; `sent` are its bytes that found room somewhere."""

    def __init__(self) -> None:
        self.sent = 0
        self.left = asyncio.Event()

    async def __call__(self, _body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, EVENTS))
        events = chunk("x" * 1000) * 10
        try:
            while True:
                writer.write(events)
                await writer.drain()
                self.sent += len(events)
                await asyncio.sleep(0)
        except ConnectionError:
            self.left.set()

    async def stalled(self) -> None:
        """Returns when nothing was sent for half a second."""
        before = -1
        while before != self.sent:
            before = self.sent
            await asyncio.sleep(0.5)


async def test_a_slow_client_holds_decode_back_and_not_the_stream_in_memory(
    control_plane: RunningControlPlane,
) -> None:
    endless = Endless()
    fleet = Fleet(control_plane, p1=PREFILLS, d1=endless)
    async with (
        fleet.routed() as client,
        client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as answer,
    ):
        body = answer.aiter_raw()
        await anext(body)
        await endless.stalled()
        # What sockets of four ends hold, each a few MiB at most; without backpressure there is no
        # end to it.
        held = endless.sent
        assert held < 64 << 20
        read = 0
        async for part in body:
            read += len(part)
            if read > 2 * held:
                break
        assert endless.sent > held


async def test_a_client_that_reads_nothing_is_given_up(control_plane: RunningControlPlane) -> None:
    endless = Endless()
    fleet = Fleet(control_plane, p1=PREFILLS, d1=endless)
    async with (
        fleet.routed(client_seconds=1) as client,
        client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}),
    ):
        async with asyncio.timeout(30):
            await endless.left.wait()
        metrics = (await client.get("/metrics")).text
        assert "kvxfer_router_aborted_total 1.0" in metrics
        assert "kvxfer_router_running 0.0" in metrics
