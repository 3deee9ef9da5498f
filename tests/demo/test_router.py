from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from kvxfer.demo.router import Router
from kvxfer.errors import (
    BlockPoolExhausted,
    NoCapacity,
    PeerLost,
    TransferCancelled,
    TransferError,
    WorkerError,
)

TRANSFER = {
    "transfer_id": "t1",
    "request_id": "r1",
    "model": "demo",
    "prompt_tokens": 3,
    "prefill": {
        "instance_id": "p",
        "epoch": 1,
        "engine_address": "kvx://h:1/aa",
        "http_address": "http://prefill",
    },
    "decode": {
        "instance_id": "d",
        "epoch": 2,
        "engine_address": "kvx://h:2/bb",
        "http_address": "http://decode",
    },
    "prefill_blocks": 1,
    "decode_blocks": 1,
    "created_at": 0.0,
    "expires_at": 60.0,
    "ticket": "signed",
}
ANSWER = {
    "id": "r1",
    "created": 0,
    "model": "demo",
    "choices": [{"text": "a", "token_ids": [97], "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
PREFILL = ANSWER | {
    "transfer": {"fabric": "tcp", "bytes": 1, "pages": 1, "writes": 1, "seconds": 0.1},
    "timings": {"prefill": 0.5, "send": 0.0},
}
CHOICE = {"index": 0, "text": "a", "token_ids": [97], "finish_reason": "length"}
TIMINGS = {"prefill": 0.5, "visible_transfer": 0.0, "first_token": 0.6, "decode": 0.0}
DECODE = ANSWER | {"choices": [CHOICE], "timings": TIMINGS}


def problem(status: int, code: str, detail: str) -> httpx2.Response:
    return httpx2.Response(status, json={"code": code, "detail": detail})


class Network(httpx2.AsyncBaseTransport):
    """A control plane and two workers; `prefill` and `decode` are their answers, None if a worker
    does not answer before the router cancels the request."""

    def __init__(self, prefill: httpx2.Response | None, decode: httpx2.Response | None) -> None:
        self.workers = {"prefill": prefill, "decode": decode}
        self.asked: dict[str, dict[str, Any]] = {}
        self.given_up: list[str] = []
        self.released = False
        self.opened = httpx2.Response(201, json=TRANSFER)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        host = request.url.host
        if host == "control":
            if request.method == "DELETE":
                self.released = True
                return httpx2.Response(204)
            return self.opened
        self.asked[host] = json.loads(request.content)
        answer = self.workers[host]
        if answer is not None:
            return answer
        never: asyncio.Future[httpx2.Response] = asyncio.get_running_loop().create_future()
        try:
            return await never
        finally:
            self.given_up.append(host)


async def route(network: Network) -> Any:
    async with Router("http://control", transport=network) as router:
        return await router.complete([1, 2, 3], model="demo", max_tokens=1)


async def test_both_workers_get_the_same_request_and_the_reservation_is_released() -> None:
    network = Network(httpx2.Response(200, json=PREFILL), httpx2.Response(200, json=DECODE))
    routed = await route(network)
    assert routed.decode.choices[0].token_ids == [97]
    assert routed.prefill.transfer.fabric == "tcp"
    assert network.asked["prefill"]["prompt"] == network.asked["decode"]["prompt"] == [1, 2, 3]
    assert routed.decode.timings.first_token == 0.6
    for side, asked in network.asked.items():
        meeting = asked["kv_transfer_params"]
        assert meeting.pop("do_remote_prefill", False) is (side == "decode")
        assert asked["kv_transfer_params"] == {
            "ticket": "signed",
            "prefill_engine_address": "kvx://h:1/aa",
        }
    assert network.released


@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_when_one_side_fails_the_other_is_given_up(failing: str) -> None:
    network = Network(None, None)
    network.workers[failing] = problem(503, "block-pool-exhausted", "no block is free")
    with pytest.raises(BlockPoolExhausted, match="no block is free"):
        await route(network)
    assert network.given_up == [{"prefill": "decode", "decode": "prefill"}[failing]]
    assert network.released


async def test_the_cause_is_raised_rather_than_its_echo() -> None:
    echo = problem(409, "transfer-cancelled", "cancelled by the other side")
    cause = problem(503, "block-pool-exhausted", "no block is free")
    for network in (Network(echo, cause), Network(cause, echo)):
        with pytest.raises(BlockPoolExhausted):
            await route(network)
    with pytest.raises(TransferCancelled):
        await route(Network(echo, echo))


async def test_a_refusal_of_the_control_plane_is_raised_and_no_worker_is_asked() -> None:
    network = Network(None, None)
    network.opened = problem(503, "no-capacity", "no pair can take it")
    with pytest.raises(NoCapacity, match="no pair can take it"):
        await route(network)
    assert network.asked == {}


async def test_a_worker_that_does_not_answer_is_named() -> None:
    class Broken(Network):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if request.url.host == "prefill":
                raise httpx2.ConnectError("connection refused")
            return await super().handle_async_request(request)

    with pytest.raises(PeerLost, match=r"http://prefill does not answer .connection refused"):
        await route(Broken(None, None))


async def test_an_answer_that_is_not_a_problem_document_is_an_error_too() -> None:
    with pytest.raises(WorkerError, match="the worker at http://decode answered HTTP 500"):
        await route(Network(None, httpx2.Response(500, text="Internal Server Error")))
    with pytest.raises(TransferError, match=r"odd \[unheard-of\]"):
        await route(Network(None, problem(500, "unheard-of", "odd")))
