"""The coordinator's report of an update: what it contains, and that no step waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx2
import pytest

from kvxfer.client import (
    ControlPlaneClient,
    Decision,
    PartReport,
    PartState,
    WeightUpdate,
    WeightUpdateReport,
)
from kvxfer.errors import (
    ControlPlaneUnavailable,
    DigestMismatch,
    OldVersion,
    WeightUpdateExists,
)
from kvxfer.weight_updates import UpdateError, UpdateState
from tests.virtual_time import passes
from verify.processes.control_plane import worker

COMMIT, ABORT = Decision.COMMIT, Decision.ABORT


@pytest.fixture
async def client(network):
    """A client of a control plane that need not run."""
    async with network.client(deadline=0) as client:
        yield client


@pytest.fixture
async def there(network, client):
    """A control plane with one instance, where no lease ends."""
    async with network.control_plane(lease_seconds=600):
        await client.register(worker("a"))
        yield


def report(client: ControlPlaneClient, **options: Any) -> WeightUpdateReport:
    return WeightUpdateReport(client, **{"model": "llama", "version": 1, **options})


async def only(client: ControlPlaneClient) -> WeightUpdate:
    (update,) = await client.weight_updates()
    return update


async def test_an_update_is_reported_from_begin_to_end(client, there):
    async with report(client, update_id="u", instances=["a"]) as update:
        assert (await only(client)).state is UpdateState.STAGING
        update.progress(PartReport(instance_id="a", state=PartState.STAGED), sent_bytes=7)
        await passes(0.1)
        told = await only(client)
        assert (told.instances[0].state, told.bytes) == (PartState.STAGED, 7)
        assert await update.decide(COMMIT) is COMMIT
        update.progress(PartReport(instance_id="a", state=PartState.COMMITTED, version=1))
        update.progress(PartReport(instance_id="a", pause_seconds=0.5))
        await update.end("committed")
    told = await client.weight_update("u")
    assert told.state is UpdateState.COMMITTED
    (part,) = told.instances
    assert (part.state, part.version, part.pause_seconds) == (PartState.COMMITTED, 1, 0.5)


async def test_the_lease_is_kept_as_long_as_the_report_lasts(client, there):
    async with report(client) as update:
        await passes(100)
        assert (await only(client)).under_way
        await update.end("aborted", UpdateError(code="peer-lost", message="b"))
    told = await only(client)
    assert told.error == UpdateError(code="peer-lost", message="b")


async def test_the_error_of_the_block_is_the_reason_of_the_abort(client, there):
    with pytest.raises(DigestMismatch):
        async with report(client):
            raise DigestMismatch("rank 1 of 'a'")
    told = await only(client)
    assert (told.state, told.error) == (
        UpdateState.ABORTED,
        UpdateError(code="digest-mismatch", message="rank 1 of 'a'"),
    )


async def test_an_update_that_was_decided_is_not_aborted_by_an_error(client, there):
    with pytest.raises(DigestMismatch):
        async with report(client) as update:
            await update.decide(COMMIT)
            raise DigestMismatch("rank 1 of 'a'")
    assert (await only(client)).state is UpdateState.COMMITTING


async def test_the_coordinator_learns_that_others_decided(client, there):
    async with report(client, update_id="u") as update:
        assert update.decision is None
        await client.decide_weight_update("u", ABORT)
        await passes(20)
        assert update.decision is ABORT
        assert await update.decide(COMMIT) is ABORT


async def test_an_update_that_is_refused_does_not_begin(client, there):
    async with report(client, version=2, update_id="u"):
        with pytest.raises(WeightUpdateExists):
            async with report(client, version=3):
                raise AssertionError
    with pytest.raises(OldVersion):
        await serve_version(client, 5)
        async with report(client, version=5):
            raise AssertionError


async def serve_version(client: ControlPlaneClient, version: int) -> None:
    from kvxfer.model_identity import ModelIdentity

    await client.register(worker("b", identity=ModelIdentity(weights_version=version)))


async def test_without_the_control_plane_the_update_continues(client):
    begun = asyncio.get_running_loop().time()
    async with report(client, patience=2.0) as update:
        update.progress(PartReport(instance_id="a", state=PartState.STAGED))
        assert await update.decide(COMMIT) is COMMIT
        await update.end("committed")
    assert asyncio.get_running_loop().time() - begun <= 4.0


async def test_a_control_plane_that_never_answers_costs_no_more_than_the_patience(clock):
    class Silent(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            await asyncio.Event().wait()
            raise AssertionError

    async with ControlPlaneClient("http://h:1", transport=Silent(), clock=clock) as client:
        begun = clock.monotonic()
        async with report(client, patience=2.0) as update:
            assert clock.monotonic() - begun <= 2.0
            update.progress(PartReport(instance_id="a"))
            begun = clock.monotonic()
            assert await update.decide(COMMIT) is COMMIT
            assert clock.monotonic() - begun <= 2.0


async def test_if_it_is_required_there_is_no_update_without_the_control_plane(client, network):
    with pytest.raises(ControlPlaneUnavailable):
        async with report(client, required=True):
            raise AssertionError
    async with network.control_plane(lease_seconds=600):
        await client.register(worker("a"))
        begun = report(client, required=True)
        await begun.__aenter__()
    with pytest.raises(ControlPlaneUnavailable):
        await begun.decide(COMMIT)
    await begun.end("aborted")


async def test_a_control_plane_that_comes_back_gets_the_report(client, network):
    async with report(client, update_id="u") as update:
        update.progress(PartReport(instance_id="a", state=PartState.STAGED))
        await passes(5)
        # The second control plane is new and does not know the update.
        for _ in range(2):
            async with network.control_plane(lease_seconds=600):
                await client.register(worker("a"))
                update.progress(PartReport(instance_id="a", state=PartState.STAGED))
                await passes(20)
                told = await only(client)
                assert (told.update_id, told.instances[0].state) == ("u", PartState.STAGED)
            await passes(5)


async def test_a_known_decision_holds_without_the_control_plane(network, client):
    async with contextlib.AsyncExitStack() as control_plane:
        await control_plane.enter_async_context(network.control_plane(lease_seconds=600))
        await client.register(worker("a"))
        async with report(client, update_id="u") as update:
            await client.decide_weight_update("u", ABORT)
            await passes(20)
            assert update.decision is ABORT
            await control_plane.aclose()
            assert await update.decide(COMMIT) is ABORT
