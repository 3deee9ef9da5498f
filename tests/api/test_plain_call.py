"""Requests that are as they should be take a short way; all others get FastAPI's own answer."""

from __future__ import annotations

import httpx2
import pytest
from fastapi import Response
from pydantic import BaseModel

from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.plain_call import plain_call
from kvxfer.api.routes import instances, transfers

from .conftest import join, problem, registration

JSON = "application/json"
# The same to a reader, and not what the short way looks for.
JSON_IN_FULL = "application/json; charset=utf-8"


class Body(BaseModel):
    number: int = 0


async def takes_a_query(body: Body, app: ControlPlaneDep, number: int = 0) -> Response: ...
async def takes_no_body(app: ControlPlaneDep) -> Response: ...
async def takes_no_application(body: Body) -> Response: ...
async def takes_a_body_or_none(app: ControlPlaneDep, body: Body = Body()) -> Response: ...  # noqa: B008
async def answers_with_a_model(body: Body, app: ControlPlaneDep) -> Body: ...


@pytest.mark.parametrize(
    ("endpoint", "path_names"),
    [
        (transfers.open_, set()),
        (instances.register, set()),
        (instances.heartbeat, {"instance_id"}),
    ],
)
def test_the_busiest_routes_take_the_short_way(endpoint, path_names):
    assert plain_call(endpoint, path_names) is not None


@pytest.mark.parametrize(
    "endpoint",
    [
        takes_a_query,
        takes_no_body,
        takes_no_application,
        takes_a_body_or_none,
        answers_with_a_model,
    ],
)
def test_what_needs_more_goes_the_long_way(endpoint):
    assert plain_call(endpoint, set()) is None


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"prompt_tokens": 40}', 201, None),
        (b"{}", 201, None),
        (b'{"prompt_tokens": "many"}', 422, "invalid-argument"),
        (b'{"prompt_tokens": 40, "extra": 1}', 422, "invalid-argument"),
        (b'{"prompt_tokens": 40', 422, "invalid-argument"),
        (b'{"model": "\xff"}', 422, "invalid-argument"),
        (b"[]", 422, "invalid-argument"),
        (b"", 422, "invalid-argument"),
    ],
)
async def test_both_ways_give_one_answer(api, body, status, code):
    await join(api, "p")
    await join(api, "d", "decode")
    answers = [
        await api.post("/v1/transfers", content=body, headers={"content-type": kind})
        for kind in (JSON, JSON_IN_FULL)
    ]
    assert [answer.status_code for answer in answers] == [status, status]
    short, long = (answer.json() for answer in answers)
    if code is None:
        assert short.keys() == long.keys()
        return
    for answer in answers:
        problem(answer, status, code)
    assert {**short, "request_id": ""} == {**long, "request_id": ""}


async def test_a_path_that_is_not_valid_is_refused_on_both_ways(api):
    lease = await join(api, "p")
    for kind in (JSON, JSON_IN_FULL):
        answer = await api.put(
            "/v1/instances/-p/heartbeat",
            content=b'{"epoch": %d}' % lease["epoch"],
            headers={"content-type": kind},
        )
        assert problem(answer, 422, "invalid-argument")["field"] == "instance_id"


async def test_a_body_that_says_nothing_of_its_type_is_no_json(api):
    body = httpx2.Request("POST", "http://x", json=registration("p")).content
    answer = await api.post("/v1/instances", content=body)
    problem(answer, 422, "invalid-argument")
