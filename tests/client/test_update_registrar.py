"""The control plane as registrar of weight updates: what it is sent, and which decision holds."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvxfer.client import ControlPlaneRegistrar, Decision, PartState
from kvxfer.errors import DecisionUnknown, PeerLost, WeightUpdateExists
from kvxfer.weight_updates import UpdateError, UpdateState
from kvxfer.weights.report import InstanceReport, UpdateReport
from verify.processes.control_plane import worker

DIGEST = "9f1c2a7be0d44c5e"


@pytest.fixture
async def client(network):
    async with network.client(deadline=0) as client:
        yield client


@pytest.fixture
def registrar(network, monkeypatch):
    """A registrar that uses the network's control plane, which need not run."""

    @contextlib.asynccontextmanager
    async def made(*_: object, **__: object):
        async with network.client(deadline=0) as client:
            yield client

    monkeypatch.setattr("kvxfer.client.update_registrar.ControlPlaneClient", made)
    return ControlPlaneRegistrar("llama", required=True)


@pytest.fixture
async def there(network, client):
    async with network.control_plane(lease_seconds=600):
        await client.register(worker("a"))
        yield


def ended(state: str = "committed", **more: object) -> UpdateReport:
    instance = InstanceReport("a", 1, state, 1, digest=DIGEST, pause_seconds=0.25, **more)  # type: ignore[arg-type]
    return UpdateReport("1-u", 1, "committed", 42, instances=(instance,))


async def test_an_update_is_reported_until_all_serve_it(client, there, registrar):
    async with registrar.announce("1-u", 1, ["a"]) as announced:
        announced.staged("a", DIGEST)
        assert await announced.decide()
        await announced.ended(ended())
    told = await client.weight_update("1-u")
    assert (told.state, told.bytes) == (UpdateState.COMMITTED, 42)
    (part,) = told.instances
    assert (part.state, part.version, part.digest, part.pause_seconds) == (
        PartState.COMMITTED,
        1,
        DIGEST,
        0.25,
    )


async def test_a_failed_instance_is_reported_with_the_reason(client, there, registrar):
    async with registrar.announce("1-u", 1, ["a"]) as announced:
        assert await announced.decide()
        await announced.ended(ended("failed", error="out of memory"))
    (part,) = (await client.weight_update("1-u")).instances
    assert part.state is PartState.FAILED
    assert part.error is not None
    assert part.error.message == "out of memory"


async def test_the_reason_of_an_abort_is_reported(client, there, registrar):
    with pytest.raises(PeerLost):
        async with registrar.announce("1-u", 1, ["a"]):
            raise PeerLost("training rank 1 was lost")
    told = await client.weight_update("1-u")
    assert told.state is UpdateState.ABORTED
    assert told.error == UpdateError(code="peer-lost", message="training rank 1 was lost")


async def test_a_decision_that_others_took_first_holds(client, there, registrar):
    async with registrar.announce("1-u", 1, ["a"]) as announced:
        await client.decide_weight_update("1-u", Decision.ABORT)
        assert not await announced.decide()


async def test_an_update_beside_another_one_is_refused(client, there, registrar):
    async with registrar.announce("1-u", 1, ["a"]):
        with pytest.raises(WeightUpdateExists):
            async with registrar.announce("2-u", 2, ["a"]):
                raise AssertionError


async def test_a_decision_without_an_answer_is_unknown_in_the_end(network, client, registrar):
    async with contextlib.AsyncExitStack() as control_plane:
        await control_plane.enter_async_context(network.control_plane(lease_seconds=600))
        await client.register(worker("a"))
        async with registrar.announce("1-u", 1, ["a"]) as announced:
            await control_plane.aclose()
            begun = asyncio.get_running_loop().time()
            with pytest.raises(DecisionUnknown, match="1-u is committed"):
                await announced.decide()
            assert asyncio.get_running_loop().time() - begun <= 30
