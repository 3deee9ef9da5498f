"""A large fleet is answered in pages."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest

from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.instances import InstanceState
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from tests.control_plane import calling
from verify.polling import PATIENCE, eventually
from verify.processes.control_plane import CLUSTER_KEY, worker

from .conftest import join, problem

NEXT = re.compile(r'<(.+)>; rel="next"')


def following(answer: httpx2.Response) -> str | None:
    link = answer.headers.get("link")
    return None if link is None else NEXT.fullmatch(link)[1]


async def pages(api: httpx2.AsyncClient, path: str) -> list[list[dict[str, Any]]]:
    found = []
    while path is not None:
        answer = await api.get(path)
        assert answer.status_code == 200, answer.text
        (items,) = [value for value in answer.json().values() if isinstance(value, list)]
        found.append(items)
        path = following(answer)
    return found


def ids(found: list[list[dict[str, Any]]]) -> list[list[str]]:
    return [[item["instance_id"] for item in page] for page in found]


# --- instances -------------------------------------------------------------------------------


async def test_a_large_fleet_is_listed_in_several_pages(api, registry):
    for number in range(2500):
        await registry.register(worker(f"p{number:04}", "prefill"), state=InstanceState.READY)
    found = ids(await pages(api, "/v1/instances"))
    assert [len(page) for page in found] == [1000, 1000, 500]
    assert [each for page in found for each in page] == [f"p{number:04}" for number in range(2500)]


async def test_every_page_is_filtered(api):
    for number in range(6):
        role = "prefill" if number % 2 else "decode"
        await join(api, f"w{number}", role, state="ready" if number < 5 else "joining")
    beside = await join(api, "x", "both", model="other")
    adapter = {"epoch": beside["epoch"], "load": {"models": ["other-fr"]}}
    await api.put("/v1/instances/x/heartbeat", json=adapter)
    for query, wanted in (
        ("role=prefill", [["w1", "w3"], ["w5", "x"]]),
        ("role=prefill&state=ready&model=llama", [["w1", "w3"]]),
        ("model=other-fr", [["x"]]),
        ("model=none", [[]]),
    ):
        assert ids(await pages(api, f"/v1/instances?limit=2&{query}")) == wanted, query


async def test_instance_that_stays_is_in_one_page_while_others_come_and_go(api):
    leases = {name: await join(api, name) for name in "bdfhj"}
    first = await api.get("/v1/instances?limit=2")
    for name in "ac":
        await join(api, name)
    await join(api, "g")
    await api.delete("/v1/instances/d", params={"epoch": leases["d"]["epoch"]})
    rest = ids(await pages(api, following(first)))
    assert ids([first.json()["instances"]]) == [["b", "d"]]
    assert rest == [["f", "g"], ["h", "j"]]


@pytest.mark.parametrize("path", ["/v1/instances", "/v1/transfers"])
@pytest.mark.parametrize("cursor", ["", "a", "b'x'", "%00", "bnVsbA==", "W10=", "é", "x" * 513])
async def test_invalid_cursor_is_refused(api, path, cursor):
    answer = problem(await api.get(f"{path}?cursor={cursor}"), 422, "invalid-argument")
    assert answer["detail"].startswith("cursor: ")


@pytest.mark.parametrize("limit", [0, 1001, -1])
async def test_page_has_a_limit(api, limit):
    answer = await api.get("/v1/instances", params={"limit": limit})
    assert problem(answer, 422, "invalid-argument")["field"] == "limit"


# --- etags -----------------------------------------------------------------------------------


async def tag_of(api: httpx2.AsyncClient, query: str = "") -> str:
    return (await api.get(f"/v1/instances{query}")).headers["etag"]


async def test_page_that_a_client_has_is_not_sent_again(api):
    for name in "abc":
        await join(api, name)
    first = await api.get("/v1/instances?limit=2")
    tag = first.headers["etag"]
    assert tag.startswith('W/"')
    for known in (tag, tag.removeprefix("W/"), f'"x", {tag}', "*"):
        again = await api.get("/v1/instances?limit=2", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert (again.headers["etag"], following(again)) == (tag, following(first))
    other = await api.get("/v1/instances?limit=2", headers={"If-None-Match": 'W/"x"'})
    assert other.json() == first.json()


async def test_tag_changes_with_what_instances_are_and_not_with_their_load(api, clock):
    lease = await join(api, "p", state="joining")
    seen = [await tag_of(api)]

    async def beat(**members: Any) -> None:
        body = {"epoch": lease["epoch"], **members}
        assert (await api.put("/v1/instances/p/heartbeat", json=body)).status_code == 200

    async def changed() -> bool:
        seen.append(await tag_of(api))
        return seen[-1] not in seen[:-1]

    clock.advance(1)
    await beat(load={"running": 7})
    assert not await changed()
    await beat(state="ready")
    assert await changed()
    await beat(load={"models": ["fr"]})
    assert await changed()
    await api.post("/v1/instances/p/role", json={"role": "decode"})
    assert await changed()
    await join(api, "q")
    assert await changed()
    assert await tag_of(api, "?limit=1") not in seen


@pytest.mark.native
async def test_tag_is_the_same_on_every_replica(empty_redis, clock):
    def replica() -> Any:
        registry = RedisRegistry(empty_redis.url, LeasePolicy(6.0), clock=clock, timeout=PATIENCE)
        return calling(create_app(Settings(cluster_key=CLUSTER_KEY), registry, clock=clock))

    async with replica() as one, replica() as other:
        await eventually(lambda: _is_ready(one))
        await eventually(lambda: _is_ready(other))
        for name in "ab":
            await join(one, name)
        assert await tag_of(one) == await tag_of(other)


async def _is_ready(api: httpx2.AsyncClient) -> bool:
    return (await api.get("/readyz")).status_code == 200


# --- transfers -------------------------------------------------------------------------------


async def test_transfers_come_in_pages_the_oldest_first(api, clock):
    await join(api, "p")
    await join(api, "d", "decode")
    opened = []
    for number in range(5):
        answer = await api.post("/v1/transfers", json={"prompt_tokens": 1})
        opened.append(answer.json()["transfer_id"])
        clock.advance(number % 2)  # some of them begin at the same time
    found = await pages(api, "/v1/transfers?limit=2&instance_id=d")
    assert [len(page) for page in found] == [2, 2, 1]
    listed = [transfer for page in found for transfer in page]
    assert sorted(one["transfer_id"] for one in listed) == sorted(opened)
    assert [one["created_at"] for one in listed] == sorted(one["created_at"] for one in listed)
