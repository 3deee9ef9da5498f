"""When a call is sent again, when it is not, and how long that may take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvxfer.api.tokens import watch_tokens
from kvxfer.client import ControlPlaneClient, Credentials, SyncControlPlaneClient
from kvxfer.client.answers import Failed
from kvxfer.client.retries import policy
from kvxfer.errors import (
    ControlPlaneError,
    ControlPlaneUnavailable,
    NoCapacity,
    RateLimited,
    Unauthenticated,
    UnknownInstance,
)
from tests.control_plane import RunningControlPlane

OK = httpx.Response(200, json={"instances": []})
LISTED = "instances"


def problem(status: int, code: str, headers: Any = None, **members: Any) -> httpx.Response:
    body = {"code": code, "detail": "it said so", **members}
    return httpx.Response(status, json=body, headers=headers)


def again(answer: httpx.Response) -> httpx.Response:
    """A copy: a response belongs to the one client that reads it, sync or async."""
    headers = {n: v for n, v in answer.headers.items() if n == "retry-after"}
    return httpx.Response(answer.status_code, headers=headers, content=answer.content)


class Server:
    """Gives its answers in turn, the last one for ever, and counts who asks."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return again(answer)


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """What was waited; nothing is really, and the policy's clock goes on by it."""
    waited: list[float] = []

    class Slept:
        def __await__(self) -> Iterator[None]:
            return iter(())

    def sleep(seconds: float) -> Slept:
        waited.append(seconds)
        return Slept()

    def changed(deadline: float) -> dict[str, Any]:
        # tenacity counts time that passes; here only pauses take any.
        def stop(state: Any) -> bool:
            return sum(waited) + state.upcoming_sleep >= deadline

        return {**policy(deadline), "stop": stop, "sleep": sleep}

    monkeypatch.setattr("kvxfer.client.clients.policy", changed)
    return waited


Caller = Callable[..., Any]


@pytest.fixture(params=["async", "sync"])
def ask(request) -> Caller:
    """Calls a method of either client; both promise the same."""

    async def ask(server: Server, method: str, *args: Any, **options: Any) -> Any:
        deadline = options.pop("deadline", 60.0)
        transport = httpx.MockTransport(server)
        if request.param == "sync":
            with SyncControlPlaneClient("http://c", deadline=deadline, transport=transport) as sync:
                return getattr(sync, method)(*args, **options)
        async with ControlPlaneClient("http://c", deadline=deadline, transport=transport) as client:
            return await getattr(client, method)(*args, **options)

    return ask


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("cut off"),
        problem(503, "control-plane-unavailable"),
        problem(429, "rate-limited"),
        httpx.Response(502),
        httpx.Response(503),
    ],
    ids=repr,
)
async def test_trouble_that_passes_is_waited_out(ask, pauses, trouble):
    server = Server(trouble, trouble, OK)
    assert await ask(server, LISTED) == ()
    assert (len(server.requests), len(pauses)) == (3, 2)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (problem(503, "no-capacity", reasons=["full"]), NoCapacity),
        (problem(404, "unknown-instance"), UnknownInstance),
        (problem(401, "unauthenticated"), Unauthenticated),
        (problem(500, "internal-error"), ControlPlaneError),
        (httpx.Response(200, content=b"<html>"), ControlPlaneError),
    ],
    ids=lambda value: getattr(value, "code", None),
)
async def test_answer_that_will_be_the_same_is_raised_at_once(ask, pauses, trouble, error):
    server = Server(trouble, OK)
    with pytest.raises(error):
        await ask(server, LISTED)
    assert (len(server.requests), pauses) == (1, [])


@pytest.mark.parametrize(
    ("trouble", "sent"),
    [
        (httpx.ReadTimeout("slow"), 1),
        (httpx.RemoteProtocolError("cut off"), 1),
        (httpx.Response(502), 1),
        (httpx.ConnectError("refused"), 2),
        (problem(429, "rate-limited"), 2),
        (problem(503, "control-plane-unavailable"), 2),
    ],
    ids=repr,
)
async def test_reservation_is_not_made_twice(ask, pauses, trouble, sent):
    """Where nobody knows whether the first request was carried out, there is no second one."""
    server = Server(trouble, problem(503, "no-capacity"))
    with pytest.raises(ControlPlaneError):
        await ask(server, "open_transfer", model="m")
    assert len(server.requests) == sent


async def test_same_request_is_sent_again(ask, pauses):
    server = Server(httpx.ConnectError("refused"), problem(503, "no-capacity"))
    with pytest.raises(NoCapacity):
        await ask(server, "open_transfer", model="m", prompt_tokens=5)
    first, second = server.requests
    assert (first.url, first.content) == (second.url, second.content)


async def test_deadline_is_not_passed(ask, pauses):
    server = Server(httpx.ConnectError("refused"))
    with pytest.raises(ControlPlaneUnavailable, match="refused"):
        await ask(server, LISTED, deadline=8.0)
    assert len(server.requests) > 3
    assert sum(pauses) < 8.0


async def test_deadline_of_zero_is_one_attempt(ask, pauses):
    server = Server(httpx.ConnectError("refused"))
    with pytest.raises(ControlPlaneUnavailable):
        await ask(server, LISTED, deadline=0)
    assert (len(server.requests), pauses) == (1, [])


async def test_nobody_comes_before_retry_after(ask, pauses):
    away = problem(503, "control-plane-unavailable", {"Retry-After": "7"})
    assert await ask(Server(away, OK), LISTED) == ()
    assert 7 <= pauses[0] <= 9


async def test_retry_after_beyond_the_deadline_is_not_waited_for(ask, pauses):
    server = Server(problem(429, "rate-limited", {"Retry-After": "90"}))
    with pytest.raises(RateLimited):
        await ask(server, LISTED)
    assert (len(server.requests), pauses) == (1, [])


async def test_fraction_of_a_second_counts_where_it_is_told(ask, pauses):
    fast = problem(429, "rate-limited", {"Retry-After": "1"}, retry_after_seconds=0.25)
    assert await ask(Server(fast, OK), LISTED) == ()
    assert 0.25 <= pauses[0] <= 0.45


def test_pauses_differ_from_client_to_client_and_grow(seed: int):
    random.seed(seed)

    failed = Failed(ControlPlaneUnavailable("away"), again=True)
    outcome = SimpleNamespace(exception=lambda: failed)

    def drawn(attempt: int) -> list[float]:
        state = SimpleNamespace(attempt_number=attempt, outcome=outcome)
        return [policy(10)["wait"](state) for _ in range(200)]

    first, later = drawn(1), drawn(9)
    assert len(set(first)) > 100
    assert max(first) <= 0.2
    assert max(later) <= 2.0 < max(later) + 0.2
    assert sum(later) > sum(first) * 4


def test_limited_client_of_a_real_server_gets_every_answer_in_time(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("node worker token-of-the-node\n")
    with RunningControlPlane(tokens=watch_tokens(file), rate_limit=40.0) as server:
        credentials = Credentials(token="token-of-the-node")
        with SyncControlPlaneClient(server.url, credentials=credentials) as client:
            began = time.monotonic()
            for _ in range(80):
                assert client.instances() == ()
            # 40 at once, then 40 per second.
            assert time.monotonic() - began > 0.9


# --- tokens ----------------------------------------------------------------------------------


class Gate:
    """Takes one token."""

    def __init__(self, token: str) -> None:
        self.token, self.asked = token, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if request.headers.get("Authorization") == f"Bearer {self.token}":
            return again(OK)
        return problem(401, "unauthenticated")


def client_of(gate: Gate, credentials: Credentials | None = None) -> SyncControlPlaneClient:
    return SyncControlPlaneClient(
        "http://c", credentials=credentials, transport=httpx.MockTransport(gate)
    )


def test_token_of_the_environment_is_sent(monkeypatch, tmp_path):
    monkeypatch.setenv("KVXFER_TOKEN", "of-the-environment")
    assert client_of(Gate("of-the-environment")).instances() == ()
    monkeypatch.delenv("KVXFER_TOKEN")
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    monkeypatch.setenv("KVXFER_TOKEN_FILE", str(file))
    assert client_of(Gate("of-the-file")).instances() == ()


def test_token_file_that_changed_is_read_when_the_old_one_is_refused(tmp_path):
    file = tmp_path / "token"
    file.write_text("old")
    gate = Gate("old")
    client = client_of(gate, Credentials(token_file=file))
    client.instances()
    file.write_text("newer")
    gate.token = "newer"
    assert client.instances() == ()
    assert gate.asked == 3


def test_refused_token_that_did_not_change_is_an_error(tmp_path):
    file = tmp_path / "token"
    file.write_text("old")
    gate = Gate("new")
    with pytest.raises(Unauthenticated):
        client_of(gate, Credentials(token_file=file)).instances()
    assert gate.asked == 1


def test_token_is_in_no_text_of_the_client():
    credentials = Credentials(token="very-secret")
    client = client_of(Gate("very-secret"), credentials)
    assert "very-secret" not in repr(credentials) + repr(client) + str(vars(client))
