from __future__ import annotations

import logging

import pytest

from kvxfer.api.settings import Settings
from kvxfer.errors import (
    ControlPlaneUnavailable,
    GpuLost,
    InvalidArgument,
    KvxferError,
    NoCapacity,
    StaleEpoch,
    TransferRefused,
)

from .conftest import problem, registration


async def test_unknown_path_is_not_found(api):
    body = problem(await api.get("/v2/instances"), 404, "not-found")
    assert "/v2/instances" in body["detail"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PATCH", "/v1/instances", "GET, POST"),
        ("POST", "/v1/instances/p", "DELETE, GET"),
        ("PUT", "/v1/transfers", "GET, POST"),
        ("DELETE", "/healthz", "GET"),
        ("BREW", "/healthz", "GET"),
    ],
)
async def test_wrong_method_names_the_right_ones(api, method, path, allowed):
    answer = await api.request(method, path)
    body = problem(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == allowed
    assert allowed in body["detail"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"x"'])
async def test_body_that_is_not_an_object_is_invalid(api, content):
    headers = {"content-type": "application/json"}
    answer = await api.post("/v1/instances", content=content, headers=headers)
    problem(answer, 422, "invalid-argument")


async def test_broken_json_says_where(api):
    headers = {"content-type": "application/json"}
    answer = await api.post("/v1/transfers", content=b'{"model": }', headers=headers)
    body = problem(answer, 422, "invalid-argument")
    assert body["detail"] == "the body is not JSON: Expecting value at character 10"


@pytest.mark.parametrize("content", [b'{"model": "\\ud800"}', b'{"prompt_tokens": NaN}'])
async def test_lone_surrogates_and_nan_are_invalid(api, content):
    headers = {"content-type": "application/json"}
    answer = await api.post("/v1/transfers", content=content, headers=headers)
    problem(answer, 422, "invalid-argument")


async def test_a_name_with_a_lone_surrogate_is_ignored_like_other_unknown_ones(api):
    headers = {"content-type": "application/json"}
    answer = await api.post("/v1/transfers", content=b'{"\\ud800": 1}', headers=headers)
    problem(answer, 503, "no-capacity")


async def test_number_out_of_range_is_invalid(api):
    answer = await api.post("/v1/transfers", json={"prompt_tokens": 10**30})
    assert problem(answer, 422, "invalid-argument")["field"] == "prompt_tokens"


async def test_every_invalid_member_is_listed_and_the_first_is_the_detail(api):
    body = {**registration("p"), "num_blocks": 0, "role": "chef"}
    answer = problem(await api.post("/v1/instances", json=body), 422, "invalid-argument")
    assert [(e["location"], e["field"]) for e in answer["errors"]] == [
        ("body", "role"),
        ("body", "num_blocks"),
    ]
    assert answer["field"] == "role"
    assert answer["detail"].startswith("role: Input should be")
    assert answer["detail"].endswith("(and 1 more, see errors)")


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (ControlPlaneUnavailable("registry away"), 503, "1"),
        (NoCapacity("full", reasons=["a"]), 503, "1"),
        (StaleEpoch("old"), 409, None),
        (TransferRefused("no"), 409, None),
        (GpuLost("gone"), 500, None),
        (KvxferError("what"), 500, None),
    ],
)
async def test_every_kvxfer_error_keeps_its_code(
    api, registry, monkeypatch, error, status, retry_after
):
    async def fail() -> None:
        raise error

    monkeypatch.setattr(registry, "ping", fail)
    answer = await api.get("/readyz")
    assert problem(answer, status, error.code)["detail"] == str(error)
    assert answer.headers.get("retry-after") == retry_after


async def test_details_of_an_error_never_replace_members_of_the_standard(
    api, registry, monkeypatch
):
    async def fail() -> None:
        raise StaleEpoch("old", status=200, code="ok", epoch=3)

    monkeypatch.setattr(registry, "ping", fail)
    assert problem(await api.get("/readyz"), 409, "stale-epoch")["epoch"] == 3


async def test_defect_is_a_problem_that_reveals_nothing_internal(
    api, registry, monkeypatch, caplog
):
    async def fail() -> None:
        raise RuntimeError("secret of the inside")

    monkeypatch.setattr(registry, "ping", fail)
    with caplog.at_level(logging.ERROR, logger="kvxfer.api"):
        answer = await api.get("/readyz")
    problem(answer, 500, "internal-error")
    assert "secret" not in answer.text
    assert "GET /readyz failed" in caplog.text


def test_short_cluster_key_is_refused():
    with pytest.raises(InvalidArgument, match="at least 16"):
        Settings(cluster_key=b"short")


@pytest.mark.parametrize("name", ["transfer_seconds", "weight_update_seconds"])
@pytest.mark.parametrize("value", [0, -1])
def test_duration_that_is_not_positive_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgument, match=f"{name} is {value}"):
        Settings(cluster_key=bytes(16), **{name: value})


def test_cluster_key_is_not_shown():
    assert "secret" not in repr(Settings(cluster_key=b"a secret of 24 bytes...."))
