from __future__ import annotations

import asyncio
import base64
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from kvxfer.client import ControlPlaneClient, SyncControlPlaneClient
from kvxfer.clock import CLOCK_LEEWAY
from kvxfer.errors import ControlPlaneUnavailable, UnknownBlockTable, UnknownTransfer
from kvxfer.instances import InstanceState, Role
from kvxfer.kv.block_table import BlockTable
from kvxfer.ticket import Ticket, sign_ticket, verify_ticket
from tests.asgi import AsgiTransport
from tests.virtual_time import passes
from verify.polling import eventually
from verify.processes.block_tables import block_table
from verify.processes.control_plane import CLUSTER_KEY, RunningControlPlane, worker

from .conftest import join, problem


class Opened:
    """An open transfer between p and d, and its ticket."""

    def __init__(self, body: dict[str, Any], now: float) -> None:
        self.ticket = verify_ticket(body["ticket"], CLUSTER_KEY, now=now)
        self.token = body["ticket"]
        self.path = f"/v1/transfers/{body['transfer_id']}/block-table"

    def table(self, ticket: Ticket | None = None, **offer: Any) -> BlockTable:
        offer = {"ticket": self.token, **offer} if ticket is None else offer
        return block_table(ticket or self.ticket, **offer)


@pytest.fixture
async def opened(api, clock) -> Opened:
    await join(api, "p")
    await join(api, "d", "decode")
    return await open_another(api, clock)


async def open_another(api, clock) -> Opened:
    return Opened((await api.post("/v1/transfers", json={})).json(), clock.unix())


def as_json(table: BlockTable, **offer: Any) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(table))
    return {**body, "offer": {**body["offer"], **offer}}


async def test_table_is_put_and_fetched_as_decode_made_it(api, opened):
    table = opened.table()
    answer = await api.post(opened.path, json=as_json(table))
    assert (answer.status_code, answer.content) == (201, b"")
    assert answer.headers["location"] == opened.path
    answer = await api.get(opened.path)
    assert answer.status_code == 200
    assert answer.json() == as_json(table)
    assert msgspec.json.decode(answer.content, type=BlockTable) == table


async def test_same_table_may_be_put_again_and_another_one_is_refused(api, opened):
    for _ in range(2):
        assert (await api.post(opened.path, json=as_json(opened.table()))).status_code == 201
    answer = await api.post(opened.path, json=as_json(opened.table(imm=1)))
    body = problem(answer, 409, "block-table-exists")
    assert body["transfer_id"] == opened.ticket.transfer_id
    assert (await api.get(opened.path)).json() == as_json(opened.table())


def changed(data: str) -> str:
    raw = bytearray(base64.b64decode(data))
    raw[-1] ^= 1
    return base64.b64encode(raw).decode()


@pytest.mark.parametrize("member", ["blocks", "grants", "imm", "lease_seconds", "mac", "decode_id"])
async def test_table_altered_on_the_way_is_refused(api, opened, member):
    body = as_json(opened.table())
    match member:
        case "blocks":
            body["offer"]["blocks"] = changed(body["offer"]["blocks"])
        case "grants":
            body["offer"]["grants"][2] = changed(body["offer"]["grants"][2])
        case "imm" | "lease_seconds":
            body["offer"][member] += 1
        case "mac":
            body["mac"] = changed(body["mac"])
        case _:
            body["decode_id"] = "other"
    detail = problem(await api.post(opened.path, json=body), 403, "ticket-invalid")["detail"]
    assert "signature does not fit" in detail
    problem(await api.get(opened.path), 404, "unknown-block-table")


async def test_foreign_ticket_is_refused(api, opened):
    foreign = sign_ticket(opened.ticket, b"the key of another cluster")
    body = as_json(block_table(opened.ticket, ticket=foreign))
    detail = problem(await api.post(opened.path, json=body), 403, "ticket-invalid")["detail"]
    assert "the ticket cannot be trusted" in detail


async def test_table_of_another_cluster_is_refused(api, opened):
    body = as_json(block_table(opened.ticket, key=b"the key of another cluster"))
    problem(await api.post(opened.path, json=body), 403, "ticket-invalid")


async def test_ticket_that_has_expired_is_refused(api, opened, clock):
    clock.advance(30 + CLOCK_LEEWAY)
    body = problem(await api.post(opened.path, json=as_json(opened.table())), 403, "ticket-expired")
    assert "expired 5.0 s ago" in body["detail"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefill_epoch": 1}, "names prefill worker 'p' of epoch 1"),
        ({"decode_epoch": 1}, "names decode worker 'd' of epoch 1"),
        ({"prefill_id": "q"}, "names prefill worker 'q'"),
        ({"decode_id": "e"}, "names decode worker 'e'"),
    ],
)
async def test_stale_epoch_or_another_pair_is_refused(api, opened, change, said):
    table = opened.table(replace(opened.ticket, **change))
    body = problem(await api.post(opened.path, json=as_json(table)), 409, "block-table-mismatch")
    assert said in body["detail"]
    problem(await api.get(opened.path), 404, "unknown-block-table")


async def test_table_of_another_transfer_is_refused(api, opened, clock):
    other = await open_another(api, clock)
    answer = await api.post(opened.path, json=as_json(other.table()))
    body = problem(answer, 409, "block-table-mismatch")
    assert repr(other.ticket.transfer_id) in body["detail"]
    for transfer in (opened, other):
        problem(await api.get(transfer.path), 404, "unknown-block-table")


async def test_transfer_that_is_not_open_is_unknown(api, opened):
    await api.delete(opened.path.removesuffix("/block-table"))
    problem(await api.post(opened.path, json=as_json(opened.table())), 404, "unknown-transfer")
    problem(await api.get(opened.path, params={"wait_seconds": 30}), 404, "unknown-transfer")


async def test_table_ends_with_the_registration_of_its_decode_worker(api, opened):
    await api.post(opened.path, json=as_json(opened.table()))
    await api.delete("/v1/instances/d", params={"epoch": opened.ticket.decode_epoch})
    problem(await api.get(opened.path), 404, "unknown-transfer")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"blocks": "AwA"}, "offer.blocks"),
        ({"blocks": "A wA="}, "offer.blocks"),
        ({"grants": ["!"]}, "offer.grants.0"),
        ({"imm": 1 << 32}, "offer.imm"),
        ({"imm": -1}, "offer.imm"),
        ({"lease_seconds": 0}, "offer.lease_seconds"),
        ({"type": "accepted"}, "offer.type"),
        ({"ticket": "x" * 4097}, "offer.ticket"),
        ({"first_block": -1}, "offer.first_block"),
    ],
)
async def test_invalid_table_is_refused_by_its_member(api, opened, change, field):
    answer = await api.post(opened.path, json=as_json(opened.table(), **change))
    assert problem(answer, 422, "invalid-argument")["field"] == field


@pytest.mark.parametrize("wait", ["-1", "31", "nan", "x"])
async def test_invalid_wait_is_refused(api, opened, wait):
    answer = await api.get(opened.path, params={"wait_seconds": wait})
    assert problem(answer, 422, "invalid-argument")["field"] == "wait_seconds"


async def test_wait_is_answered_as_soon_as_the_table_arrives(api, opened):
    waiting = asyncio.create_task(api.get(opened.path, params={"wait_seconds": 5}))
    await passes(4.9)
    assert not waiting.done()
    await api.post(opened.path, json=as_json(opened.table()))
    await passes(0.01)
    assert waiting.done()
    assert (await waiting).json() == as_json(opened.table())


async def test_wait_ends_after_its_time_with_unknown_block_table(api, opened, clock):
    began = clock.monotonic()
    answer = await api.get(opened.path, params={"wait_seconds": 2.5})
    assert problem(answer, 404, "unknown-block-table")["transfer_id"] == opened.ticket.transfer_id
    assert clock.monotonic() == began + 2.5


async def test_large_table_is_read_and_a_too_large_one_is_refused(api, opened):
    large = opened.table(blocks=bytes(4 * 250_000))
    body = msgspec.json.encode(large)
    assert len(body) > 1 << 20, "larger than other bodies may be"
    headers = {"content-type": "application/json"}
    assert (await api.post(opened.path, content=body, headers=headers)).status_code == 201
    assert msgspec.json.decode((await api.get(opened.path)).content, type=BlockTable) == large
    answer = await api.post(opened.path, content=b" " * (2 << 20), headers=headers)
    assert "1572864 bytes" in problem(answer, 413, "body-too-large")["detail"]
    elsewhere = await api.post("/v1/transfers", content=body, headers=headers)
    assert "1048576 bytes" in problem(elsewhere, 413, "body-too-large")["detail"]


# --- through the clients ---------------------------------------------------------------------


@pytest.fixture
def called(app, api, clock):
    """Makes clients of the control plane that `api` runs."""
    transport = AsgiTransport({"kvxfer": app})
    return partial(ControlPlaneClient, "http://kvxfer", transport=transport, clock=clock)


async def open_over(client: ControlPlaneClient) -> BlockTable:
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        await client.register(worker(name, role), state=InstanceState.READY)
    opened = await client.open_transfer()
    return block_table(verify_ticket(opened.ticket, CLUSTER_KEY, now=client._clock.unix()))


async def test_client_waits_longer_than_its_timeout_for_a_table(called, clock):
    async with called(timeout=0.2) as client:
        table = await open_over(client)
        transfer_id = table.offer.transfer_id
        began = clock.monotonic()
        with pytest.raises(UnknownBlockTable):
            await client.block_table(transfer_id, wait_seconds=0.6)
        assert clock.monotonic() == pytest.approx(began + 0.6)
        waiting = asyncio.create_task(client.block_table(transfer_id, wait_seconds=9))
        await passes(3)
        await client.put_block_table(table)
        assert await waiting == table
        assert clock.monotonic() == pytest.approx(began + 3.6)


async def test_client_that_leaves_ends_its_wait(called, api, registry, caplog):
    async with called() as client:
        transfer_id = (await open_over(client)).offer.transfer_id
        asking = asyncio.create_task(client.block_table(transfer_id, wait_seconds=30))
        await passes(1)
        assert registry._arrivals._waiting
        asking.cancel()
        await passes(0.01)
        assert not registry._arrivals._waiting
    assert 'status="499"' in (await api.get("/metrics")).text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.native
async def test_both_clients_exchange_a_table_over_a_connection():
    with RunningControlPlane() as server:
        async with ControlPlaneClient(server.url) as client:
            table = await open_over(client)
            transfer_id = table.offer.transfer_id
            waiting = asyncio.create_task(client.block_table(transfer_id, wait_seconds=30))
            await eventually(lambda: server.registry._arrivals._waiting)
            await client.put_block_table(table)
            assert await waiting == table
        with SyncControlPlaneClient(server.url) as client:
            client.put_block_table(table)
            assert client.block_table(transfer_id) == table
            client.release_transfer(transfer_id)
            with pytest.raises(UnknownTransfer):
                client.put_block_table(table)


@pytest.mark.native
async def test_client_that_hangs_up_ends_its_wait():
    with RunningControlPlane() as server:
        async with ControlPlaneClient(server.url) as client:
            transfer_id = (await open_over(client)).offer.transfer_id
            asking = asyncio.create_task(client.block_table(transfer_id, wait_seconds=30))
            await eventually(lambda: server.registry._arrivals._waiting)
            asking.cancel()
            await eventually(lambda: not server.registry._arrivals._waiting)


@pytest.mark.native
async def test_control_plane_that_stops_ends_the_waits():
    with RunningControlPlane() as server:
        async with ControlPlaneClient(server.url, deadline=0) as client:
            transfer_id = (await open_over(client)).offer.transfer_id
            waiting = asyncio.create_task(client.block_table(transfer_id, wait_seconds=30))
            await eventually(lambda: server.registry._arrivals._waiting)
            await asyncio.to_thread(server.stop)
            with pytest.raises(ControlPlaneUnavailable):
                await waiting
