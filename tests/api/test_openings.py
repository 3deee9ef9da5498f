"""Transfers are opened and released without FastAPI; its routes would give the same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from pydantic import TypeAdapter, ValidationError

from kvxfer.api.app import create_app
from kvxfer.api.openings import PATH, OpenTransfers
from kvxfer.api.routes import transfers
from kvxfer.api.settings import Settings
from kvxfer.transfers import TransferRequest
from kvxfer.unreadable import UNREADABLE
from kvxfer.web.tokens import Scope, watch_tokens
from tests.control_plane import calling
from verify.processes.control_plane import CLUSTER_KEY

from .conftest import join, problem


@pytest.fixture
def by_fastapi(monkeypatch) -> list[TransferRequest]:
    """The requests that reached FastAPI's route."""
    seen: list[TransferRequest] = []
    opened = transfers.open_transfer

    async def noted(app: Any, body: TransferRequest, receive: Any) -> Any:
        seen.append(body)
        return await opened(app, body, receive)

    monkeypatch.setattr(transfers, "open_transfer", noted)
    return seen


async def pair(api: httpx2.AsyncClient) -> None:
    await join(api, "p")
    await join(api, "d", "decode")


async def test_a_request_does_not_reach_fastapi(api, by_fastapi):
    await pair(api)
    asked = {"prefix_hashes": ["00000000000000ff"], "wait_seconds": 1, "prompt_tokens": 40}
    opened = await api.post(PATH, json=asked)
    assert opened.status_code == 201
    released = await api.delete(opened.headers["location"])
    assert (released.status_code, released.content) == (204, b"")
    assert not by_fastapi


@pytest.mark.parametrize("more", [{}, {"explain": True}, {"wait_seconds": 0.5}])
async def test_both_ways_give_the_same_answer(api, by_fastapi, more):
    await pair(api)
    asked = {"transfer_id": "t", "model": "llama", **more}
    quick = await api.post(PATH, json={**asked, "prompt_tokens": 40})
    slow = await api.post(PATH, json={**asked, "prompt_tokens": "40"})  # a number in a string
    assert len(by_fastapi) == 1
    assert quick.status_code == slow.status_code == 201
    assert quick.json() == slow.json()
    assert quick.headers.keys() == slow.headers.keys()


async def test_unknown_member_is_named_by_fastapi(api, by_fastapi):
    await pair(api)
    answer = await api.post(PATH, json={"prompt_tokens": 40, "colour": "red"})
    assert (answer.status_code, answer.headers["kvxfer-ignored"]) == (201, "colour")
    assert len(by_fastapi) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"prompt_tokens": 0}', b"[" * 5000])
async def test_refused_body_is_described_by_fastapi(api, content):
    answer = await api.post(PATH, content=content, headers={"content-type": "application/json"})
    assert problem(answer, 422, "invalid-argument")["detail"]


async def test_no_pair_and_no_transfer_are_named(api):
    problem(await api.post(PATH, json={"model": "llama"}), 503, "no-capacity")
    problem(await api.delete(f"{PATH}/t"), 404, "unknown-transfer")


async def test_scopes_and_rate_limit_hold(tmp_path: Path, registry, clock):
    file = tmp_path / "tokens"
    file.write_text("".join(f"the-{scope} {scope} token-of-the-{scope}\n" for scope in Scope))
    tokens = watch_tokens(file, clock=clock)
    settings = Settings(cluster_key=CLUSTER_KEY, tokens=tokens, rate_limit=5, max_body_bytes=2000)
    async with calling(create_app(settings, registry, clock=clock)) as api:

        async def asked(scope: str, **more: Any) -> httpx2.Response:
            headers = {"Authorization": f"Bearer token-of-the-{scope}"}
            return await api.post(PATH, json={"prompt_tokens": 40, **more}, headers=headers)

        problem(await api.post(PATH, json={}), 401, "unauthenticated")
        problem(await asked("worker"), 403, "forbidden")
        problem(await asked("router", request_id="r" * 3000), 413, "body-too-large")
        codes = [(await asked("router")).json()["code"] for _ in range(6)]
        assert codes == ["no-capacity"] * 4 + ["rate-limited"] * 2


# --- reading a body ----------------------------------------------------------------------------

_fastapi = TypeAdapter(TransferRequest)
_odd = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(-2, 2**64),
    some.floats(),
    some.text(max_size=8),
    some.lists(some.sampled_from(["00000000000000ff", "0xffffffffffff01", "p", 1]), max_size=3),
)
_bodies = some.dictionaries(
    some.sampled_from([*TransferRequest.__struct_fields__, "colour"]), _odd, max_size=4
)


@given(_bodies)
def test_bodies_are_read_as_fastapi_reads_them(body):
    content = json.dumps(body).encode()
    try:
        quick = OpenTransfers.read(OpenTransfers.__new__(OpenTransfers), content)
    except UNREADABLE:
        return
    try:
        assert _fastapi.validate_python(json.loads(content)) == quick
    except ValidationError:
        pytest.fail(f"FastAPI refuses {msgspec.json.encode(body)!r}")
