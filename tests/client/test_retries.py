"""Calls that are sent again, calls that are not, and how long that may take."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from kvxfer.client import ControlPlaneClient, Credentials, SyncControlPlaneClient
from kvxfer.client.answers import Failed
from kvxfer.client.retries import policy
from kvxfer.clock import Clock
from kvxfer.errors import (
    ControlPlaneError,
    ControlPlaneUnavailable,
    NoCapacity,
    RateLimited,
    Unauthenticated,
    UnknownInstance,
)
from kvxfer.web.tokens import watch_tokens
from tests.virtual_time import VirtualClock

OK = httpx2.Response(200, json={"instances": []})
LISTED = "instances"


def problem(status: int, code: str, headers: Any = None, **members: Any) -> httpx2.Response:
    body = {"code": code, "detail": "it said so", **members}
    return httpx2.Response(status, json=body, headers=headers)


def again(answer: httpx2.Response) -> httpx2.Response:
    """Returns a copy: a response belongs to the one client that reads it, sync or async."""
    headers = {n: v for n, v in answer.headers.items() if n == "retry-after"}
    return httpx2.Response(answer.status_code, headers=headers, content=answer.content)


class Server:
    """A server that gives its answers in turn, the last one for ever, and records each request and
    its time."""

    def __init__(self, clock: Clock, *answers: httpx2.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx2.Request] = []
        self._clock = clock
        self._times: list[float] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        self._times.append(self._clock.monotonic())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return again(answer)

    @property
    def pauses(self) -> list[float]:
        """The seconds between one request and the next."""
        return [later - sooner for sooner, later in itertools.pairwise(self._times)]


@pytest.fixture
def serving(clock: VirtualClock) -> Callable[..., Server]:
    return functools.partial(Server, clock)


Caller = Callable[..., Any]


@pytest.fixture(params=["async", "sync"])
def ask(request, clock: VirtualClock) -> Caller:
    """Calls a method of either client; both promise the same."""

    async def ask(server: Server, method: str, *args: Any, **options: Any) -> Any:
        given: dict[str, Any] = {
            "deadline": options.pop("deadline", 60.0),
            "transport": httpx2.MockTransport(server),
            "clock": clock,
        }
        if request.param == "sync":
            with SyncControlPlaneClient("http://c", **given) as sync:
                return getattr(sync, method)(*args, **options)
        async with ControlPlaneClient("http://c", **given) as client:
            return await getattr(client, method)(*args, **options)

    return ask


@pytest.mark.parametrize(
    "trouble",
    [
        httpx2.ConnectError("refused"),
        httpx2.ConnectTimeout("slow"),
        httpx2.ReadTimeout("slow"),
        httpx2.RemoteProtocolError("cut off"),
        problem(503, "control-plane-unavailable"),
        problem(429, "rate-limited"),
        httpx2.Response(502),
        httpx2.Response(503),
    ],
    ids=repr,
)
async def test_temporary_trouble_is_waited_out(ask, serving, trouble):
    server = serving(trouble, trouble, OK)
    assert await ask(server, LISTED) == ()
    assert len(server.requests) == 3
    assert all(0 < pause <= 0.2 for pause in server.pauses)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (problem(503, "no-capacity", reasons=["full"]), NoCapacity),
        (problem(404, "unknown-instance"), UnknownInstance),
        (problem(401, "unauthenticated"), Unauthenticated),
        (problem(500, "internal-error"), ControlPlaneError),
        (httpx2.Response(200, content=b"<html>"), ControlPlaneError),
    ],
    ids=lambda value: getattr(value, "code", None),
)
async def test_answer_that_would_be_the_same_again_is_raised_at_once(
    ask, serving, clock, trouble, error
):
    server = serving(trouble, OK)
    asked = clock.monotonic()
    with pytest.raises(error):
        await ask(server, LISTED)
    assert len(server.requests) == 1
    assert clock.monotonic() == asked


@pytest.mark.parametrize(
    ("trouble", "sent"),
    [
        (httpx2.ReadTimeout("slow"), 1),
        (httpx2.RemoteProtocolError("cut off"), 1),
        (httpx2.Response(502), 1),
        (httpx2.ConnectError("refused"), 2),
        (problem(429, "rate-limited"), 2),
        (problem(503, "control-plane-unavailable"), 2),
    ],
    ids=repr,
)
async def test_reservation_is_not_made_twice(ask, serving, trouble, sent):
    """If it is unknown whether the first request was carried out, there is no second one."""
    server = serving(trouble, problem(503, "no-capacity"))
    with pytest.raises(ControlPlaneError):
        await ask(server, "open_transfer", model="m")
    assert len(server.requests) == sent


async def test_same_request_is_sent_again(ask, serving):
    server = serving(httpx2.ConnectError("refused"), problem(503, "no-capacity"))
    with pytest.raises(NoCapacity):
        await ask(server, "open_transfer", model="m", prompt_tokens=5)
    first, second = server.requests
    assert (first.url, first.content) == (second.url, second.content)


async def test_deadline_is_not_passed(ask, serving, clock):
    server = serving(httpx2.ConnectError("refused"))
    asked = clock.monotonic()
    with pytest.raises(ControlPlaneUnavailable, match="refused"):
        await ask(server, LISTED, deadline=8.0)
    assert len(server.requests) > 3
    # A pause is 2 s at most; the next one would have ended too late.
    assert 6.0 <= clock.monotonic() - asked < 8.0


async def test_the_last_answer_is_raised_if_the_deadline_cuts_the_next_attempt_short(ask, serving):
    said = problem(503, "control-plane-unavailable", {"Retry-After": "2"})
    server = serving(said, said, httpx2.ReadTimeout("slow"))
    with pytest.raises(ControlPlaneUnavailable, match="it said so") as raised:
        await ask(server, LISTED, deadline=6.0)
    assert len(server.requests) >= 3
    assert not raised.value.hurried


async def test_an_attempt_that_times_out_in_full_is_the_error(ask, serving):
    said = problem(503, "control-plane-unavailable")
    server = serving(said, httpx2.ReadTimeout("slow"))
    with pytest.raises(ControlPlaneUnavailable, match="no control plane answers") as raised:
        await ask(server, LISTED, deadline=60.0)
    assert raised.value.hurried


async def test_deadline_of_zero_is_one_attempt(ask, serving, clock):
    server = serving(httpx2.ConnectError("refused"))
    asked = clock.monotonic()
    with pytest.raises(ControlPlaneUnavailable):
        await ask(server, LISTED, deadline=0)
    assert len(server.requests) == 1
    assert clock.monotonic() == asked


async def test_no_call_is_repeated_before_retry_after(ask, serving):
    server = serving(problem(503, "control-plane-unavailable", {"Retry-After": "7"}), OK)
    assert await ask(server, LISTED) == ()
    [pause] = server.pauses
    assert 7 <= pause <= 7.2


async def test_retry_after_beyond_the_deadline_is_not_waited_for(ask, serving, clock):
    server = serving(problem(429, "rate-limited", {"Retry-After": "90"}))
    asked = clock.monotonic()
    with pytest.raises(RateLimited):
        await ask(server, LISTED)
    assert len(server.requests) == 1
    assert clock.monotonic() == asked


async def test_retry_after_in_the_body_counts_with_its_fraction_of_a_second(ask, serving):
    fast = problem(429, "rate-limited", {"Retry-After": "1"}, retry_after_seconds=0.25)
    server = serving(fast, OK)
    assert await ask(server, LISTED) == ()
    [pause] = server.pauses
    assert 0.25 <= pause <= 0.45


def test_pauses_differ_from_client_to_client_and_grow(seed: int):
    random.seed(seed)

    failed = Failed(ControlPlaneUnavailable("away"), again=True)
    outcome = SimpleNamespace(exception=lambda: failed)

    def drawn(attempt: int) -> list[float]:
        state = SimpleNamespace(attempt_number=attempt, outcome=outcome)
        return [policy(10, VirtualClock())["wait"](state) for _ in range(200)]

    first, later = drawn(1), drawn(9)
    assert len(set(first)) > 100
    assert max(first) <= 0.2
    assert max(later) <= 2.0 < max(later) + 0.2
    assert sum(later) > sum(first) * 4


async def test_limited_client_gets_every_answer_as_soon_as_it_may(network, clock, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("node worker token-of-the-node\n")
    credentials = Credentials(token="token-of-the-node")
    async with (
        network.control_plane(tokens=watch_tokens(file), rate_limit=40.0),
        network.client(credentials=credentials) as client,
    ):
        began = clock.monotonic()
        for number in range(80):
            assert await client.instances() == ()
            # 40 at once, then 40 per second, each with a pause of up to 0.2 s.
            early = max(number - 39, 0) / 40
            assert early - 0.001 <= clock.monotonic() - began <= early + 0.21


# --- tokens ----------------------------------------------------------------------------------


class Gate:
    """A server that accepts one token."""

    def __init__(self, token: str) -> None:
        self.token, self.asked = token, 0

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked += 1
        if request.headers.get("Authorization") == f"Bearer {self.token}":
            return again(OK)
        return problem(401, "unauthenticated")


def client_of(gate: Gate, credentials: Credentials | None = None) -> SyncControlPlaneClient:
    return SyncControlPlaneClient(
        "http://c", credentials=credentials, transport=httpx2.MockTransport(gate)
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
