"""Retries: which failures, on which pair, how often, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from kvxfer.instances import BlockUpdate, InstanceState, Role
from kvxfer.prefix_hashes import prompt_hashes
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import Answer, Network, Reply
from tests.virtual_time import VirtualClock, passes
from verify.processes.control_plane import worker

from .servers import DECODES, PREFILLS, answers, chunk, problem

ASKED = {"model": "llama", "prompt": "hi"}
EVENTS = "text/event-stream"


class NotedWorkers:
    """Workers by id; those that begin with p are prefill workers. `asked` has the ids of the
    workers in the order of their requests."""

    def __init__(self, network: Network, **workers: Answer) -> None:
        self.asked: list[str] = []
        self._network = network
        self._workers = workers

    @contextlib.asynccontextmanager
    async def routed(self, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
        for name, answer in self._workers.items():
            role = Role.PREFILL if name.startswith("p") else Role.DECODE
            await self._network.join(name, role, self._noted(name, answer))
        async with self._network.routed(**settings) as client:
            yield client

    def _noted(self, name: str, answer: Answer) -> Answer:
        async def noted(body: dict[str, Any], reply: Reply) -> None:
            self.asked.append(name)
            await answer(body, reply)

        return noted


async def test_a_prompt_of_token_ids_goes_where_its_beginning_is_cached(
    network: Network,
    control_plane: EmbeddedRegistry,
) -> None:
    prompt = list(range(1000))
    fleet = NotedWorkers(network, p1=PREFILLS, p2=PREFILLS, d1=DECODES)
    async with fleet.routed() as client:
        async with network.client() as workers:
            epoch = (await workers.instance("p2")).epoch
            cached = BlockUpdate(added=prompt_hashes(prompt[:500], "llama"))
            await workers.publish_blocks("p2", epoch, cached)
        for asked in (prompt, "some text", prompt[::-1]):
            await client.post("/v1/completions", json={**ASKED, "prompt": asked})
    assert [name for name in fleet.asked if name.startswith("p")] == ["p2", "p1", "p1"]


async def hangs_up(_body: dict[str, Any], _reply: Reply) -> None:
    pass


async def waits(_body: dict[str, Any], _reply: Reply) -> None:
    await asyncio.Event().wait()


BREAKS_OFF = answers(200, EVENTS, chunk("a"))


async def falls_silent(body: dict[str, Any], reply: Reply) -> None:
    await BREAKS_OFF(body, reply)
    await asyncio.Event().wait()


SAYS_ERROR = answers(200, EVENTS, chunk("a") + b'data: {"error": {"code": "transfer-error"}}\n\n')


FAILURES = [
    (hangs_up, "peer-lost"),
    (problem(503, "block-pool-exhausted"), "block-pool-exhausted"),
    (problem(403, "ticket-invalid"), "ticket-invalid"),
    (answers(503, "text/plain", b"oops"), "worker-error"),
]
SERVER_ERROR = (answers(500, "text/plain", b"oops"), "worker-error")
STREAM_FAILURES = [
    (answers(200, EVENTS, b""), "peer-lost"),
    (answers(200, EVENTS, b"data: [DONE]\n\n"), "protocol-error"),
    (answers(200, EVENTS, b"data: nonsense\n\n"), "protocol-error"),
]


@pytest.mark.parametrize(
    ("side", "bad", "code"),
    [
        *(("p", *failure) for failure in [*FAILURES, SERVER_ERROR]),
        *(("d", *failure) for failure in [*FAILURES, SERVER_ERROR, *STREAM_FAILURES]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_another_pair_may_do_better_is_tried_on_another_pair(
    network: Network,
    control_plane: EmbeddedRegistry,
    bad: Answer,
    code: str,
    side: str,
    stream: bool,
) -> None:
    first_failed = asyncio.Event()

    async def prefills_second(body: dict[str, Any], reply: Reply) -> None:
        first_failed.set()
        await PREFILLS(body, reply)

    async def decodes_later(body: dict[str, Any], reply: Reply) -> None:
        """Decodes, but not before a prefill worker has failed."""
        await first_failed.wait()
        await DECODES(body, reply)

    good = prefills_second if side == "p" else DECODES
    other = {"d": decodes_later} if side == "p" else {"p": PREFILLS}
    fleet = NotedWorkers(network, **{f"{side}1": bad, f"{side}2": good}, **other)
    async with fleet.routed() as client:
        answer = await client.post("/v1/completions", json={**ASKED, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert [name for name in fleet.asked if name[0] == side] == [f"{side}1", f"{side}2"]
        metrics = (await client.get("/metrics")).text
    assert f'kvxfer_router_retries_total{{code="{code}"}} 1.0' in metrics
    assert not await control_plane.transfers()


async def test_an_instance_without_http_address_is_named_and_another_one_asked(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    async with network.client() as workers:
        for name, role in (("p1", Role.PREFILL), ("d", Role.DECODE)):
            await workers.register(worker(name, role, http_address=""), state=InstanceState.READY)
    fleet = NotedWorkers(network, p2=PREFILLS, d2=DECODES)
    async with fleet.routed() as client:
        answer = await client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 200, answer.text
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["llama"]
        metrics = (await client.get("/metrics")).text
        assert 'kvxfer_router_retries_total{code="connect-failed"}' in metrics
        async with network.client() as workers:
            for name in ("p2", "d2"):
                epoch = (await workers.instance(name)).epoch
                await workers.deregister(name, epoch)
        answer = await client.post("/v1/completions", json=ASKED)
    assert answer.status_code == 502
    assert "' is registered without an http_address" in answer.json()["error"]["message"]
    assert {*fleet.asked} <= {"p2", "d2"}


async def test_an_error_about_the_other_side_blames_the_other_side(
    network: Network,
    control_plane: EmbeddedRegistry,
) -> None:
    said: list[str] = []

    async def decode(body: dict[str, Any], reply: Reply) -> None:
        said.append("decode")
        await (DECODES if len(said) > 1 else problem(502, "peer-lost"))(body, reply)

    fleet = NotedWorkers(network, p1=waits, p2=PREFILLS, d1=decode)
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
    network: Network, control_plane: EmbeddedRegistry, bad: Answer
) -> None:
    fleet = NotedWorkers(network, p1=waits, d1=bad, d2=DECODES)
    async with fleet.routed() as client:
        answer = await client.post("/v1/completions", json=ASKED)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "this is invalid-argument"
    assert fleet.asked.count("d1") + fleet.asked.count("d2") == 1


def failing(times: int, bad: Answer, then: Answer) -> Answer:
    """Returns a worker that fails `times` times, and then works."""
    left = [bad] * times

    async def answer(body: dict[str, Any], reply: Reply) -> None:
        await (left.pop() if left else then)(body, reply)

    return answer


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("bad", [bad for bad, _ in FAILURES])
async def test_the_only_pair_is_tried_again_after_a_pause(
    network: Network,
    control_plane: EmbeddedRegistry,
    clock: VirtualClock,
    bad: Answer,
    side: str,
) -> None:
    workers = {"p": PREFILLS, "d": DECODES}
    if side == "p":
        workers["d"] = failing(2, waits, DECODES)
    workers[side] = failing(2, bad, workers[side])
    fleet = NotedWorkers(network, p1=workers["p"], d1=workers["d"])
    async with fleet.routed() as client:
        came = clock.monotonic()
        answer = await client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 200, answer.text
        assert 0 < clock.monotonic() - came < 0.2 + 0.4
    assert fleet.asked.count(f"{side}1") == 3
    assert not await control_plane.transfers()


async def test_the_client_gets_the_last_error_of_the_only_pair(
    network: Network, control_plane: EmbeddedRegistry
) -> None:
    fleet = NotedWorkers(network, p1=waits, d1=problem(403, "ticket-invalid"))
    async with fleet.routed(attempts=3) as client:
        answer = await client.post("/v1/completions", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "ticket-invalid")
    assert fleet.asked.count("d1") == 3


async def test_attempts_are_bounded(network: Network, control_plane: EmbeddedRegistry) -> None:
    bad = problem(503, "request-aborted")
    fleet = NotedWorkers(network, p1=waits, d1=bad, d2=bad, d3=bad, d4=DECODES)
    async with fleet.routed(attempts=3) as client:
        answer = await client.post("/v1/completions", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "request-aborted")
    assert [name for name in fleet.asked if name[0] == "d"] == ["d1", "d2", "d3"]


FULL = problem(503, "block-pool-exhausted")


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("stream", [False, True])
async def test_room_at_a_worker_is_waited_for_and_costs_no_attempt(
    network: Network,
    control_plane: EmbeddedRegistry,
    clock: VirtualClock,
    side: str,
    stream: bool,
) -> None:
    room_at = clock.monotonic() + 4.5

    async def full_at_first(body: dict[str, Any], reply: Reply) -> None:
        full = clock.monotonic() < room_at
        await (FULL if full else {"p": PREFILLS, "d": DECODES}[side])(body, reply)

    async def decodes_in_time(body: dict[str, Any], reply: Reply) -> None:
        """Decodes, but not while the prefill worker has no room."""
        await (waits if clock.monotonic() < room_at else DECODES)(body, reply)

    other = {"d1": decodes_in_time} if side == "p" else {"p1": PREFILLS}
    fleet = NotedWorkers(network, **{f"{side}1": full_at_first}, **other)
    async with fleet.routed(attempts=1, capacity_seconds=5) as client:
        answer = await client.post("/v1/completions", json={**ASKED, "stream": stream})
        counted = (await client.get("/metrics")).text
    assert answer.status_code == 200, answer.text
    assert room_at <= clock.monotonic() <= room_at + 0.8
    # Pauses grow to at most 0.8 s; after the first few they are half of that on average.
    asked = fleet.asked.count(f"{side}1")
    assert 6 <= asked <= 40
    assert f'kvxfer_router_retries_total{{code="block-pool-exhausted"}} {asked - 1:.1f}' in counted
    assert not await control_plane.transfers()


@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_fleet_without_room_is_a_503_when_the_wait_for_it_ends(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock, side: str
) -> None:
    workers = {"p1": waits, "d1": waits, f"{side}1": FULL, f"{side}2": FULL}
    fleet = NotedWorkers(network, **workers)
    async with fleet.routed(attempts=1, capacity_seconds=5, tokenize_seconds=0) as client:
        came = clock.monotonic()
        answer = await client.post("/v1/completions", json=ASKED)
        assert clock.monotonic() - came == pytest.approx(5)
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert error["code"] == "no-capacity"
    assert error["message"] == (
        "no worker had room for the request within 5 s: this is block-pool-exhausted"
    )
    # The other worker is tried without a pause.
    assert {f"{side}1", f"{side}2"} <= set(fleet.asked[:4])


async def test_waits_for_room_and_for_a_pair_have_one_limit_together(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock
) -> None:
    """The router waits for room at a worker; then the worker drains, and it waits for a pair."""
    drains = asyncio.Event()

    async def drained(body: dict[str, Any], reply: Reply) -> None:
        drains.set()
        await FULL(body, reply)

    fleet = NotedWorkers(network, p1=waits, d1=drained)
    async with fleet.routed(capacity_seconds=5, tokenize_seconds=0) as client:
        came = clock.monotonic()
        request = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        await drains.wait()
        async with network.client() as operator:
            await operator.drain("d1")
        answer = await request
        # The last query for a pair comes up to a pause before the end of the wait.
        assert 5 - 0.2 <= clock.monotonic() - came <= 5
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no-capacity")


async def test_a_client_that_leaves_while_it_waits_for_room_leaves_no_reservation(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock
) -> None:
    fleet = NotedWorkers(network, p1=waits, d1=FULL)
    async with fleet.routed() as client:
        request = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        # Cancels in a pause after one of the requests to the worker.
        while fleet.asked.count("d1") < 4 or not await control_plane.transfers():
            await passes(0.001)
        request.cancel()
        await asyncio.wait([request])
        await passes(0.01)
        assert not await control_plane.transfers()


async def test_no_token_within_the_deadline_is_a_504(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock
) -> None:
    fleet = NotedWorkers(network, p1=PREFILLS, d1=waits, d2=DECODES)
    async with fleet.routed(first_token_seconds=30) as client:
        came = clock.monotonic()
        answer = await client.post("/v1/completions", json={**ASKED, "stream": True})
        assert clock.monotonic() - came == pytest.approx(30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline-exceeded")
    assert not await control_plane.transfers()


@pytest.mark.parametrize(("prefill", "seconds"), [(waits, 30), (PREFILLS, 100)])
async def test_an_answer_in_one_piece_has_two_deadlines(
    network: Network,
    control_plane: EmbeddedRegistry,
    clock: VirtualClock,
    prefill: Answer,
    seconds: float,
) -> None:
    """One deadline is for the prompt, the other for the whole answer."""
    fleet = NotedWorkers(network, p1=prefill, d1=waits)
    async with fleet.routed(first_token_seconds=30, answer_seconds=100) as client:
        came = clock.monotonic()
        answer = await client.post("/v1/completions", json=ASKED)
        assert clock.monotonic() - came == pytest.approx(seconds)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline-exceeded")
    assert not await control_plane.transfers()


async def test_a_worker_that_shows_no_sign_of_life_is_given_up(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock
) -> None:
    """Decode sends an answer in one piece, so nothing of it arrives before its end. Until then
    only `/health` shows that the worker lives."""
    alive = True

    async def health(_body: dict[str, Any], reply: Reply) -> None:
        if not alive:
            await asyncio.Event().wait()
        await reply.begin(200, "text/plain")

    await network.join("p1", Role.PREFILL, PREFILLS)
    await network.join("d1", Role.DECODE, waits, others={"/health": health})
    async with network.routed(token_seconds=10, attempts=1) as client:
        came = clock.monotonic()
        request = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        await passes(25)
        assert not request.done()
        alive = False
        answer = await request
        assert clock.monotonic() - came == pytest.approx(30 + 5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "peer-timeout")


async def test_no_attempt_begins_after_the_deadline(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock
) -> None:
    async def fails_later(body: dict[str, Any], reply: Reply) -> None:
        await passes(0.7)
        await problem(502, "peer-lost")(body, reply)

    fleet = NotedWorkers(network, p1=waits, **{f"d{n}": fails_later for n in range(4)})
    async with fleet.routed(first_token_seconds=2) as client:
        came = clock.monotonic()
        answer = await client.post("/v1/completions", json=ASKED)
        assert clock.monotonic() - came == pytest.approx(2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline-exceeded")
    assert [name for name in fleet.asked if name[0] == "d"] == ["d0", "d1", "d2"]


@pytest.mark.parametrize(
    ("bad", "code", "seconds"),
    [
        (BREAKS_OFF, "peer-lost", 0),
        (SAYS_ERROR, "transfer-error", 0),
        (falls_silent, "peer-timeout", 30),
    ],
)
async def test_after_the_first_token_a_stream_ends_with_an_error_and_an_answer_is_tried_again(
    network: Network,
    control_plane: EmbeddedRegistry,
    clock: VirtualClock,
    bad: Answer,
    code: str,
    seconds: float,
) -> None:
    fleet = NotedWorkers(network, p1=PREFILLS, d1=bad, d2=DECODES)
    async with fleet.routed(token_seconds=30) as client:
        came = clock.monotonic()
        answer = await client.post("/v1/completions", json={**ASKED, "stream": True})
        assert clock.monotonic() - came == pytest.approx(seconds)
        first, last = answer.content.strip().split(b"\n\n")
        assert b'"text":"a"' in first
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
        answer = await client.post("/v1/completions", json=ASKED)
        assert answer.json()["choices"][0]["text"] == "ab"
        metrics = (await client.get("/metrics")).text
    assert f'kvxfer_router_failed_streams_total{{code="{code}"}} 1.0' in metrics


async def test_a_pair_reserved_after_the_client_has_left_is_released(
    network: Network, control_plane: EmbeddedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, reserved, answer = control_plane.reserve, asyncio.Event(), asyncio.Event()

    async def reserve_slowly(*arguments: Any, **options: Any) -> Any:
        opened = await reserve(*arguments, **options)
        reserved.set()
        await answer.wait()
        return opened

    monkeypatch.setattr(control_plane, "reserve", reserve_slowly)
    fleet = NotedWorkers(network, p1=PREFILLS, d1=DECODES)
    async with fleet.routed() as client:
        request = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        await reserved.wait()
        assert len(await control_plane.transfers()) == 1
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await passes(0.01)
        assert "aborted_total 1.0" in (await client.get("/metrics")).text
        assert len(await control_plane.transfers()) == 1
        answer.set()
        await passes(0.01)
        assert not await control_plane.transfers()
    assert fleet.asked == []


async def test_a_client_that_reads_nothing_is_given_up_with_its_request(
    network: Network, control_plane: EmbeddedRegistry, clock: VirtualClock
) -> None:
    left: list[float] = []

    async def endless(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, EVENTS)
        try:
            while True:
                await reply.write(chunk("x"))
        finally:
            left.append(clock.monotonic())

    network.ahead = 8
    fleet = NotedWorkers(network, p1=PREFILLS, d1=endless)
    async with (
        fleet.routed(client_seconds=60) as client,
        client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}),
    ):
        began = clock.monotonic()
        await passes(59.9)
        assert not left
        await passes(0.2)
        assert left == [pytest.approx(began + 60)]
        metrics = (await client.get("/metrics")).text
        assert "kvxfer_router_aborted_total 1.0" in metrics
        assert "kvxfer_router_running 0.0" in metrics
