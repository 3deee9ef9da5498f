"""Running requests and new ones in an update, for each policy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvxfer.errors import KvxferError, RequestAborted, TransferCancelled, WrongVersion
from kvxfer.reference.compute import ComputeThread
from kvxfer.reference.versions import Admission, Policy, VersionGate, VersionSpan
from verify.polling import PATIENCE, eventually

pytestmark = pytest.mark.native


class Served:
    """A gate, and a model that consists only of its version."""

    def __init__(self, compute: ComputeThread, drain_seconds: float = PATIENCE) -> None:
        self.compute, self.version = compute, 0
        self.gate = VersionGate(compute, drain_seconds=drain_seconds)

    def swap(self) -> int:
        self.version += 1
        return self.version

    async def step(self, admission: Admission) -> int:
        def checked() -> int:
            admission.check(self.version)
            return self.version

        version = await self.compute.run(checked)
        admission.note(version)
        return version

    async def request(
        self, tokens: int, goes_on: asyncio.Event, demanded: int | None = None
    ) -> list[VersionSpan]:
        """Runs two steps, and the others once `goes_on` is set."""
        async with self.gate.admit(demanded) as admission:
            for at in range(tokens):
                if at == 2:
                    await goes_on.wait()
                await self.step(admission)
            return admission.spans


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    with contextlib.closing(ComputeThread()) as compute:
        yield Served(compute)


async def begun(served: Served, goes_on: asyncio.Event, **kwargs: int) -> asyncio.Task:  # type: ignore[type-arg]
    """Starts a request of five tokens; returns when it has two."""
    task = asyncio.create_task(served.request(5, goes_on, **kwargs))
    await eventually(
        lambda: any(each.spans and each.spans[0].tokens == 2 for each in running(served))
    )
    return task


def running(served: Served) -> set[Admission]:
    return served.gate._running


async def test_drain_lets_running_requests_end_and_new_ones_wait(served: Served) -> None:
    goes_on = asyncio.Event()
    old = await begun(served, goes_on)
    update = asyncio.create_task(served.gate.update(served.swap, Policy.DRAIN))
    await asyncio.sleep(0)
    new = asyncio.create_task(served.request(2, goes_on))
    await eventually(lambda: not served.gate._open.is_set())
    assert len(running(served)) == 1
    assert not update.done()
    goes_on.set()
    assert await old == [VersionSpan(0, 0, 5)]
    assert await update >= 0
    assert await new == [VersionSpan(1, 0, 2)]


@pytest.mark.parametrize("policy", Policy)
async def test_between_waves_nothing_is_served(served: Served, policy: Policy) -> None:
    goes_on = asyncio.Event()
    old = await begun(served, goes_on)
    first = asyncio.create_task(served.gate.update(served.swap, policy, last=False))
    await eventually(lambda: not served.gate._open.is_set())
    goes_on.set()
    if policy is Policy.ABORT:
        with pytest.raises(RequestAborted):
            await old
    else:
        assert await old == [VersionSpan(0, 0, 5)]
    await first
    new = asyncio.create_task(served.request(2, goes_on))
    middle = await served.gate.update(served.swap, policy, first=False, last=False)
    assert served.gate.version == 0
    assert not new.done()
    assert not running(served)
    assert await served.gate.update(served.swap, policy, first=False) >= middle
    assert await new == [VersionSpan(3, 0, 2)]
    assert served.gate.version == 3


async def test_requests_that_do_not_end_in_time_are_aborted() -> None:
    with contextlib.closing(ComputeThread()) as compute:
        served = Served(compute, drain_seconds=0.05)
        goes_on = asyncio.Event()
        old = await begun(served, goes_on)
        await served.gate.update(served.swap, Policy.DRAIN)
        goes_on.set()
        with pytest.raises(RequestAborted, match="weights of version 0"):
            await old


async def test_abort_ends_running_requests_before_their_next_step(served: Served) -> None:
    goes_on = asyncio.Event()
    old = await begun(served, goes_on)
    await served.gate.update(served.swap, Policy.ABORT)
    goes_on.set()
    with pytest.raises(RequestAborted, match="send the request again"):
        await old
    assert await served.request(1, goes_on) == [VersionSpan(1, 0, 1)]


async def test_a_step_that_is_queued_behind_the_update_is_not_run(served: Served) -> None:
    """The abort comes while the step waits in the compute thread."""
    hold, held = threading.Event(), threading.Event()
    async with served.gate.admit() as admission:

        def busy_step() -> None:
            held.set()
            assert hold.wait(PATIENCE)

        busy = asyncio.create_task(served.compute.run(busy_step))
        await eventually(held.is_set)
        update = asyncio.create_task(served.gate.update(served.swap, Policy.ABORT))
        await eventually(lambda: admission.error is not None)
        step = asyncio.create_task(served.step(admission))
        hold.set()
        with pytest.raises(RequestAborted):
            await step
        await busy
        await update
    assert admission.spans == []


async def test_keep_continues_requests_and_reports_spans(served: Served) -> None:
    goes_on = asyncio.Event()
    old = await begun(served, goes_on)
    await served.gate.update(served.swap, Policy.KEEP)
    goes_on.set()
    assert await old == [VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)]


async def test_a_request_that_demands_a_version_is_not_kept_over_an_update(
    served: Served,
) -> None:
    goes_on = asyncio.Event()
    old = await begun(served, goes_on, demanded=0)
    await served.gate.update(served.swap, Policy.KEEP)
    goes_on.set()
    with pytest.raises(WrongVersion, match="demands version 0 of the weights and 1 is served"):
        await old


async def test_only_the_served_version_is_given(served: Served) -> None:
    for demanded in (1, 7):
        with pytest.raises(WrongVersion, match=f"version {demanded} .* and 0 is served"):
            await served.request(1, asyncio.Event(), demanded)
    await served.gate.update(served.swap)
    assert await served.request(1, asyncio.Event(), 1) == [VersionSpan(1, 0, 1)]


async def test_a_demand_is_checked_after_the_update_that_it_waits_for(served: Served) -> None:
    settled = asyncio.Event()
    update = asyncio.create_task(
        served.gate.update(served.swap, settle=lambda: settled.wait())  # type: ignore[arg-type,return-value]
    )
    await eventually(lambda: served.version == 1)
    waiting = [
        asyncio.create_task(served.request(1, asyncio.Event(), demanded)) for demanded in (0, 1)
    ]
    await asyncio.sleep(0)
    assert not running(served)
    settled.set()
    await update
    with pytest.raises(WrongVersion):
        await waiting[0]
    assert await waiting[1] == [VersionSpan(1, 0, 1)]


async def test_an_aborted_request_whose_transfer_is_cancelled_fails_by_its_abort(
    served: Served,
) -> None:
    with pytest.raises(TransferCancelled):
        async with served.gate.admit():
            raise TransferCancelled("by the peer")
    with pytest.raises(RequestAborted):
        async with served.gate.admit():
            await served.gate.update(served.swap, Policy.ABORT)
            raise TransferCancelled("by the update")


async def test_a_failed_update_ends_the_service(served: Served) -> None:
    goes_on = asyncio.Event()
    old = await begun(served, goes_on)

    def fail() -> int:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        await served.gate.update(fail, Policy.KEEP)
    goes_on.set()
    for request in (old, served.request(1, goes_on)):
        with pytest.raises(KvxferError, match="could not be replaced: MemoryError"):
            await request
