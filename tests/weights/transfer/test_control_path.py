"""Instances that commit through their inference engine's control path, alone and beside others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from kvxfer.errors import PeerError, WeightUpdateAborted
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.trainer import _InThreads
from kvxfer.weights.transfer.registrar import Announced, NoRegistrar
from kvxfer.weights.transfer.staged import Staged
from verify.polling import eventually

from .job import Instance, job, served_by, shards, staged
from .test_faults import die, push

pytestmark = pytest.mark.native

TRAIN = [shards(number, 2) for number in range(2)]
PAIR = [shards(rank, 2, 1) for rank in range(2)]
ALONE = [shards(0, 1)]


class Path:
    """The control path of the instances in `instances`."""

    def __init__(self) -> None:
        self.instances: list[Instance] = []
        self.pinned: dict[int, Staged] = {}
        self.hold: asyncio.Event | None = None
        """Makes pin() wait until it is set."""
        self.unpin_fails = 0

    async def pin(self, update_id: str, version: int) -> None:
        for instance in self.instances:
            for rank in instance.ranks:
                self.pinned[id(rank)] = rank.pin(update_id)
        if self.hold is not None:
            await self.hold.wait()

    async def commit(self, update_id: str, version: int) -> None:
        for instance in self.instances:
            instance.serves = [staged(rank) for rank in instance.ranks]
            for rank in instance.ranks:
                rank.applied(self.pinned.pop(id(rank)))

    async def unpin(self, update_id: str) -> None:
        if self.unpin_fails:
            self.unpin_fails -= 1
            raise ConnectionError("no answer")
        self.pinned.clear()
        for instance in self.instances:
            for rank in instance.ranks:
                rank.unpin(update_id)


class Recorded(NoRegistrar):
    """A registrar that returns the given decisions, in order."""

    def __init__(self, *decisions: bool) -> None:
        self._decisions = list(decisions)

    @contextlib.asynccontextmanager
    async def announce(
        self, update_id: str, version: int, instances: Sequence[str]
    ) -> AsyncIterator[Announced]:
        yield self

    async def decide(self) -> bool:
        return self._decisions.pop(0)


@pytest.mark.parametrize("unpin_fails", [0, 1])
async def test_an_update_after_one_that_was_pinned_and_aborted(
    fabric: str, unpin_fails: int
) -> None:
    path = Path()
    path.unpin_fails = unpin_fails
    async with job(
        fabric,
        train=TRAIN,
        infer=[PAIR],
        by_message=[False],
        control_path=path,
        registrar=Recorded(True, False, True),
    ) as at:
        path.instances = at.instances
        await push(at, 1)
        assert served_by(at.instances[0]) == 1
        for ended in await push(at, 2):
            assert isinstance(ended, WeightUpdateAborted)
            assert "the recorded decision is to abort the update" in str(ended)
        assert served_by(at.instances[0]) == 1
        (report, _) = await push(at, 3)
        assert isinstance(report, UpdateReport)
        assert report.state == "committed"
        assert served_by(at.instances[0]) == 3


async def test_a_pin_does_not_decide_for_others(fabric: str) -> None:
    """The coordinator dies between the pin and the decision."""
    path = Path()
    async with job(
        fabric, train=TRAIN, infer=[ALONE, PAIR], by_message=[True, False], control_path=path
    ) as at:
        path.instances = at.instances[1:]
        await push(at, 1)
        path.hold = asyncio.Event()
        pushing = asyncio.create_task(push(at, 2))
        ranks = at.instances[1].ranks
        await eventually(lambda: len(path.pinned) == len(ranks))
        die(at, "coordinator")()
        assert all(isinstance(each, PeerError) for each in await pushing)
        asked = at.instances[1].ranks[0]
        assert asked._told(next(iter(path.pinned.values())).update_id) == "waiting"
        for rank in ranks:
            rank.unpin(path.pinned[id(rank)].update_id)
        await at.settled()
        assert [served_by(instance) for instance in at.instances] == [1, 1]


async def test_blocking_calls_run_one_after_the_other() -> None:
    """The second call waits even after the caller of the first has stopped waiting."""
    order: list[str] = []
    began, goes_on = threading.Event(), threading.Event()

    class Blocking:
        def pin(self, update_id: str, version: int) -> None:
            began.set()
            goes_on.wait()
            order.append("pinned")

        def commit(self, update_id: str, version: int) -> None:
            raise AssertionError

        def unpin(self, update_id: str) -> None:
            order.append("unpinned")

    path = _InThreads(Blocking())
    pin = asyncio.create_task(path.pin("u", 1))
    await eventually(began.is_set)
    pin.cancel()
    asyncio.get_running_loop().call_later(0.05, goes_on.set)
    await path.unpin("u")
    assert order == ["pinned", "unpinned"]
