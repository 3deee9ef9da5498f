"""The scopes that may call each route: every route of the schema against every scope."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter, FastAPI

from kvxfer.api.access import GuardedRoute
from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.instances import Lease
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.web.tokens import Scope, watch_tokens
from tests.control_plane import calling
from tests.virtual_time import passes
from verify.polling import eventually
from verify.processes.control_plane import CLUSTER_KEY, RunningControlPlane

from .conftest import problem, registration
from .test_openapi import SCHEMA

PUBLIC = {("get", "/healthz"), ("get", "/readyz")}
# The scopes that each route takes, repeated here so that a change is deliberate.
TAKES = {
    ("post", "/v1/instances"): "worker",
    ("get", "/v1/instances"): "worker router admin",
    ("get", "/v1/instances/watch"): "worker router admin",
    ("get", "/v1/instances/{instance_id}"): "worker router admin",
    ("delete", "/v1/instances/{instance_id}"): "worker admin",
    ("put", "/v1/instances/{instance_id}/heartbeat"): "worker",
    ("post", "/v1/instances/{instance_id}/blocks"): "worker",
    ("post", "/v1/instances/{instance_id}/drain"): "worker admin",
    ("delete", "/v1/instances/{instance_id}/drain"): "admin",
    ("post", "/v1/instances/{instance_id}/role"): "admin",
    ("post", "/v1/handshakes"): "worker router admin",
    ("post", "/v1/transfers"): "router",
    ("get", "/v1/transfers"): "worker router admin",
    ("get", "/v1/transfers/{transfer_id}"): "worker router admin",
    ("delete", "/v1/transfers/{transfer_id}"): "router admin",
    ("post", "/v1/transfers/{transfer_id}/block-table"): "worker router",
    ("get", "/v1/transfers/{transfer_id}/block-table"): "worker",
    ("post", "/v1/weights/updates"): "worker trainer admin",
    ("get", "/v1/weights/updates"): "worker router trainer admin",
    ("get", "/v1/weights/updates/{update_id}"): "worker router trainer admin",
    ("patch", "/v1/weights/updates/{update_id}"): "worker trainer admin",
    ("post", "/v1/weights/updates/{update_id}/decision"): "worker trainer admin",
    ("get", "/v1/scale/plan"): "admin",
    ("get", "/v1/overview"): "monitor admin",
    ("get", "/v1/overview/watch"): "monitor admin",
    ("get", "/v1/caller"): "worker router trainer admin monitor",
    ("post", "/v1/traces"): "worker router",
    ("get", "/v1/traces/{request_id}"): "admin",
    ("get", "/metrics"): "monitor admin",
}
ROUTES = [(method, path) for path, item in SCHEMA["paths"].items() for method in item]


def token(scope: str) -> str:
    return f"token-of-the-{scope}"


def bearer(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text("".join(f"the-{scope} {scope} {token(scope)}\n" for scope in Scope))
    return file


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the control plane that a test overrides."""
    return {}


@pytest.fixture
def app(tokens_file, registry, clock, settings) -> FastAPI:
    tokens = watch_tokens(tokens_file, clock=clock)
    app = create_app(
        Settings(cluster_key=CLUSTER_KEY, tokens=tokens, **settings), registry, clock=clock
    )
    app.state.control_plane.stopping.set()  # a watch ends at once
    return app


def call(api: httpx2.AsyncClient, method: str, path: str, **options: Any) -> Any:
    filled = path.replace("{instance_id}", "p").replace("{transfer_id}", "t")
    return api.request(method.upper(), filled, **options)


def test_table_covers_every_route_of_the_schema():
    assert {*TAKES, *PUBLIC} == set(ROUTES)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_schema_names_the_scopes(method, path):
    security = SCHEMA["paths"][path][method].get("security")
    if (method, path) in PUBLIC:
        assert security is None
        return
    assert {scope for one in security for scope in one["bearer"]} == set(
        TAKES[method, path].split()
    )
    assert all(len(one["bearer"]) == 1 for one in security), "one of them is enough"


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize(("method", "path"), sorted(TAKES))
async def test_route_takes_its_scopes_and_refuses_all_others(api, method, path, scope):
    answer = await call(api, method, path, headers=bearer(token(scope)))
    if scope in TAKES[method, path].split():
        assert answer.status_code not in (401, 403, 429), answer.text
        return
    body = problem(answer, 403, "forbidden")
    assert f"'the-{scope}' has {scope}" in body["detail"]
    wanted = " ".join(sorted(TAKES[method, path].split()))
    assert answer.headers["www-authenticate"] == (
        f'Bearer error="insufficient_scope", scope="{wanted}"'
    )


@pytest.mark.parametrize(
    ("headers", "challenge"),
    [
        ({}, 'Bearer realm="kvxfer"'),
        ({"Authorization": "Bearer "}, 'Bearer realm="kvxfer"'),
        ({"Authorization": token("admin")}, 'Bearer realm="kvxfer"'),
        ({"Authorization": f"Basic {token('admin')}"}, 'Bearer realm="kvxfer"'),
        (bearer("no-such-token-here"), 'Bearer realm="kvxfer", error="invalid_token"'),
        (bearer(token("admin")[:-1]), 'Bearer realm="kvxfer", error="invalid_token"'),
        (bearer(token("admin") + "x"), 'Bearer realm="kvxfer", error="invalid_token"'),
    ],
)
@pytest.mark.parametrize(("method", "path"), sorted(TAKES))
async def test_route_refuses_callers_without_a_valid_token(api, method, path, headers, challenge):
    answer = await call(api, method, path, headers=headers)
    problem(answer, 401, "unauthenticated")
    assert answer.headers["www-authenticate"] == challenge
    assert token("admin")[:-1] not in answer.text


@pytest.mark.parametrize(("method", "path"), sorted(PUBLIC))
async def test_probes_need_no_token(api, method, path):
    assert (await call(api, method, path)).status_code in (200, 503)


async def test_scheme_is_case_insensitive(api):
    answer = await api.get("/v1/instances", headers={"authorization": f"bEARER {token('admin')}"})
    assert answer.status_code == 200


async def test_body_is_not_even_parsed_for_a_stranger(api):
    headers = {"content-type": "application/json"}
    answer = await api.post("/v1/transfers", content=b"{", headers=headers)
    problem(answer, 401, "unauthenticated")


async def test_tokens_are_exchanged_without_a_restart(api, tokens_file):
    new = "token-of-the-next-month"
    tokens_file.write_text(f"the-admin admin {new}\n")
    await passes(1)
    assert (await api.get("/v1/instances", headers=bearer(new))).status_code == 200
    problem(await api.get("/v1/instances", headers=bearer(token("admin"))), 401, "unauthenticated")


async def test_without_a_tokens_file_everybody_may_do_everything(clock):
    app = create_app(Settings(cluster_key=CLUSTER_KEY), EmbeddedRegistry(clock=clock), clock=clock)
    app.state.control_plane.stopping.set()
    async with calling(app) as open_api:
        for method, path in ROUTES:
            assert (await call(open_api, method, path)).status_code not in (401, 403, 429)


def test_route_that_declares_no_scope_cannot_be_made():
    router = APIRouter(route_class=GuardedRoute)
    with pytest.raises(TypeError, match="does not say who may call it"):

        @router.get("/open")
        async def forgotten() -> None: ...


def test_router_of_open_routes_is_refused(monkeypatch):
    from kvxfer.api.routes import operations

    router = APIRouter()

    @router.get("/open")
    async def forgotten() -> None: ...

    monkeypatch.setattr(operations, "router", router)
    with pytest.raises(TypeError, match="open to all"):
        create_app(Settings(cluster_key=CLUSTER_KEY), EmbeddedRegistry())


# --- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"rate_limit": 5.0}])
async def test_caller_above_its_rate_is_told_when_to_retry(api):
    admin = bearer(token("admin"))
    for _ in range(5):
        assert (await api.get("/v1/instances", headers=admin)).status_code == 200
    answer = await api.get("/v1/instances", headers=admin)
    assert problem(answer, 429, "rate-limited")["retry_after_seconds"] == pytest.approx(0.2)
    assert answer.headers["retry-after"] == "1"
    other = await api.get("/v1/instances", headers=bearer(token("router")))
    assert other.status_code == 200
    await passes(0.2)
    assert (await api.get("/v1/instances", headers=admin)).status_code == 200


@pytest.mark.parametrize("settings", [{"rate_limit": 0}])
async def test_rate_limit_of_0_limits_nothing(api):
    for _ in range(100):
        answer = await api.get("/v1/instances", headers=bearer(token("admin")))
        assert answer.status_code == 200


async def test_guessing_tokens_is_slowed_down_and_hurts_nobody_else(api):
    answers = [await api.get("/v1/instances", headers=bearer(f"{n:020}")) for n in range(60)]
    assert [a.status_code for a in answers] == [401] * 50 + [429] * 10
    answer = await api.get("/v1/instances", headers=bearer(token("admin")))
    assert answer.status_code == 200


@pytest.mark.parametrize("settings", [{"max_body_bytes": 2000}])
@pytest.mark.parametrize("chunked", [False, True])
async def test_body_that_is_too_large_is_refused_unread(api, chunked):
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1000
            yield b" " * 1000

    answer = await api.post(
        "/v1/instances",
        content=chunks() if chunked else b" " * 1_000_000,
        headers=bearer(token("worker")) | {"content-type": "application/json"},
    )
    assert "2000 bytes" in problem(answer, 413, "body-too-large")["detail"]
    assert read <= 4000


def raw_request(port: int, head: str, body: bytes) -> bytes:
    """Returns the answer of a server to bytes that no client library would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n")
        with contextlib.suppress(OSError):  # the server may hang up on the rest
            connection.sendall(body)
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(65536)
    return b""


@pytest.mark.native
@pytest.mark.parametrize(
    "length",
    ["Transfer-Encoding: chunked", "Content-Length: 5\nTransfer-Encoding: chunked"],
    ids=["chunked", "both"],
)
def test_missing_or_false_content_length_does_not_evade_the_limit(length):
    chunks = b"".join(b"%x\r\n%b\r\n" % (500, b" " * 500) for _ in range(10)) + b"0\r\n\r\n"
    head = f"POST /v1/transfers HTTP/1.1\nHost: h\nContent-Type: application/json\n{length}\n"
    with RunningControlPlane(max_body_bytes=2000) as server:
        answer = raw_request(server.port, head, chunks)
    status = answer.split(b" ")[1:2]
    assert status in ([b"413"], [b"400"]), answer


# --- request ids and logs --------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["abc-123", "01JD.trace/7=", "x" * 128])
async def test_valid_request_id_is_kept(api, sent):
    answer = await api.get("/v1/instances/none", headers={"X-Request-ID": sent})
    assert answer.headers["x-request-id"] == problem(answer, 401, "unauthenticated")["request_id"]
    assert answer.headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "é", 'a"b', "a\tb"])
async def test_request_id_replaces_an_invalid_one(api, sent):
    first, second = [
        (await api.get("/healthz", headers={"X-Request-ID": sent.encode()})).headers["x-request-id"]
        for _ in range(2)
    ]
    assert first != second
    assert re.fullmatch(r"[0-9a-f]{16}-\d+", first)


async def test_request_id_is_on_the_answer_to_a_defect(api, app, monkeypatch, caplog):
    async def fail(*_: object) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(EmbeddedRegistry, "ping", fail)
    app.state.control_plane.stopping.clear()
    with caplog.at_level(logging.ERROR, logger="kvxfer.api"):
        answer = await api.get("/readyz", headers={"X-Request-ID": "mine"})
    assert problem(answer, 500, "internal-error")["request_id"] == "mine"
    assert answer.headers["x-request-id"] == "mine"
    (told,) = [record for record in caplog.records if record.name == "kvxfer.api"]
    assert told.request_id == "mine"


async def test_each_request_is_one_line_with_its_caller(api, registry, caplog, monkeypatch):
    register = registry.register

    async def takes_its_time(*arguments: Any, **options: Any) -> Lease:
        await passes(0.25)
        return await register(*arguments, **options)

    monkeypatch.setattr(registry, "register", takes_its_time)
    with caplog.at_level(logging.INFO, logger="kvxfer.api.requests"):
        await api.post("/v1/instances", json=registration("p"), headers=bearer(token("worker")))
        # The line comes after the answer.
        (line,) = await eventually(lambda: caplog.records)
    assert (line.method, line.path, line.status) == ("POST", "/v1/instances", 201)
    assert (line.caller, line.address) == ("the-worker", "127.0.0.1")
    assert line.seconds == 0.25
