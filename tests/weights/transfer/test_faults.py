"""Members that fail or are lost at each stage: no instance has half, and each error names its
cause."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.errors import PeerError, WeightUpdateAborted
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.transfer.links import Links
from kvxfer.weights.transfer.messages import (
    Commit,
    Failed,
    Grant,
    Planned,
    Read,
    Sent,
    Vote,
)
from kvxfer.weights.transfer.settings import UpdateSettings

from .job import Job, boxes, job, served_by, shards, weights

pytestmark = pytest.mark.native

TRAIN = [shards(number, 2) for number in range(2)]
INFER = [[shards(rank, 2, 1) for rank in range(2)], [shards(0, 1)]]


def instead_of(links: Links, kind: type, act: Callable[[], object]) -> None:
    """Calls `act` instead of sending the first message of this kind."""
    send = links.send

    def steered(peer: Any, message: Any) -> bool:
        if isinstance(message, kind):
            links.send = send  # type: ignore[method-assign]
            act()
            return True
        return send(peer, message)

    links.send = steered  # type: ignore[method-assign]


async def push(at: Job, version: int) -> list[UpdateReport | BaseException]:
    """Pushes a version; returns each training rank's report or error."""
    whole = weights(version)
    pushed = [
        sender.push(version, boxes(sender.holdings, whole))
        for sender in at.senders
        if not sender._engine._closed
    ]
    ended = await asyncio.gather(*(each.report for each in pushed), return_exceptions=True)
    await asyncio.gather(*(each.read for each in pushed))
    return ended


def die(at: Job, name: str) -> Callable[[], object]:
    """Returns a function that closes the member's engine, as if its process had been killed."""
    engine = next(each for each in at.engines if each.name == name)
    return lambda: asyncio.ensure_future(engine.close())


@pytest.mark.parametrize(
    ("victim", "stage"),
    [
        ("t1", Planned),
        ("t1", Sent),
        ("t1", Read),
        ("i0/1", Planned),
        ("i0/1", Grant),
        ("i0/1", Vote),
        ("i1/0", Grant),
        ("i1/0", Vote),
    ],
)
async def test_a_member_that_is_lost_before_the_vote_changes_nothing(
    fabric: str, victim: str, stage: type
) -> None:
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        await push(at, 1)
        if stage is Planned:
            at.coordinator._planned_at = -1
        instead_of(at.links(victim), stage, die(at, victim))
        ended = await push(at, 2)
        if stage is Read and isinstance(ended[0], UpdateReport):
            pytest.skip("the votes were faster than the loss")  # either result is right
        told = [each for each in ended if isinstance(each, WeightUpdateAborted)]
        assert told, ended
        names = {"t1": "training rank 1", "i0/1": "rank 1 of 'i0'", "i1/0": "rank 0 of 'i1'"}
        assert names[victim] in str(told[0])
        survivors = [each for each in at.instances if victim.split("/")[0] != each.name]
        for instance in survivors:
            assert served_by(instance) == 1


@pytest.mark.parametrize("victim", ["i0/1", "i1/0"])
@pytest.mark.parametrize("first", ["coordinator", "training ranks"])
async def test_a_lost_rank_has_one_name_whichever_member_notices_first(
    fabric: str, victim: str, first: str
) -> None:
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        await push(at, 1)
        if first == "training ranks":
            at.coordinator._links._on_lost = lambda *_: None
        else:
            for sender in at.senders:
                instead_of(sender._links, Failed, lambda: None)
        instead_of(at.links(victim), Grant, die(at, victim))
        ended = await push(at, 2)
        instance, rank = victim.split("/")
        for error in ended:
            assert isinstance(error, WeightUpdateAborted)
            told = f"rank {rank} of {instance!r} (was lost|cannot be reached): "
            expected = told if first == "coordinator" else f"training rank [01]: {told}"
            assert re.search(rf"serving the version before: {expected}", str(error)), error


@pytest.mark.parametrize("victim", ["i0/1", "i1/0"])
async def test_the_next_update_goes_to_the_remaining_instances(fabric: str, victim: str) -> None:
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        instead_of(at.links(victim), Vote, die(at, victim))
        assert all(isinstance(each, WeightUpdateAborted) for each in await push(at, 1))
        (report, again) = await push(at, 2)
        assert isinstance(report, UpdateReport)
        assert report == again
        left = next(each for each in at.instances if victim.split("/")[0] != each.name)
        assert [each.instance_id for each in report.instances] == [left.name]
        assert served_by(left) == 2


async def test_a_coordinator_that_is_lost_while_ranks_stage_changes_nothing(fabric: str) -> None:
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        await push(at, 1)
        instead_of(at.links("i1/0"), Vote, die(at, "coordinator"))
        assert all(isinstance(each, PeerError) for each in await push(at, 2))
        await at.settled()
        for instance in at.instances:
            assert served_by(instance) == 1


@pytest.mark.parametrize("told", [0, 1])
async def test_leaders_that_lose_the_coordinator_agree(fabric: str, told: int) -> None:
    """All commit if it has told one of them to, and none if it has told none."""
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        await push(at, 1)
        orders: list[tuple[Any, Any]] = []
        links = at.links("coordinator")
        send = links.send

        def steered(peer: Any, message: Any) -> bool:
            if not isinstance(message, Commit):
                return send(peer, message)
            orders.append((peer, message))
            if len(orders) == 2:
                for each in orders[:told]:
                    send(*each)
                asyncio.get_running_loop().call_later(0.1, die(at, "coordinator"))
            return True

        links.send = steered  # type: ignore[method-assign]
        assert all(isinstance(each, PeerError) for each in await push(at, 2))
        await at.settled()
        for instance in at.instances:
            assert served_by(instance) == (2 if told else 1)


async def test_a_version_that_no_leader_was_told_to_commit_can_be_pushed_again(fabric: str) -> None:
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        await push(at, 1)
        links = at.links("coordinator")
        send = links.send

        def cut_off(peer: Any, message: Any) -> bool:
            if not isinstance(message, Commit):
                return send(peer, message)
            peer.close()
            return True

        links.send = cut_off  # type: ignore[method-assign]
        (report, _) = await push(at, 2)
        assert isinstance(report, UpdateReport)
        assert {each.state for each in report.instances} == {"lost"}
        await at.settled()
        assert {served_by(instance) for instance in at.instances} == {1}
        links.send = send  # type: ignore[method-assign]
        await at.coordinator.joined(len(at.instances), 30)
        (report, _) = await push(at, 2)
        assert isinstance(report, UpdateReport)
        assert {each.state for each in report.instances} == {"committed"}
        assert {served_by(instance) for instance in at.instances} == {2}


async def test_an_instance_that_fails_while_it_applies_leaves_service(fabric: str) -> None:
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        at.instances[1].fails = True
        (report, _) = await push(at, 1)
        assert isinstance(report, UpdateReport)
        assert report.state == "committed"
        assert [(each.state, each.version) for each in report.instances] == [
            ("committed", 1),
            ("failed", None),
        ]
        assert "out of paper" in str(report.instances[1].error)
        for ended in await push(at, 2):
            assert isinstance(ended, WeightUpdateAborted)
            assert "'i1' is out of service" in str(ended)
        assert served_by(at.instances[0]) == 1


async def test_bytes_that_change_in_transit_are_not_used(
    fabric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        await push(at, 1)
        monkeypatch.setattr("kvxfer.weights.transfer.sending.source_digest", lambda *_: 0xDEADBEEF)
        for ended in await push(at, 2):
            assert isinstance(ended, WeightUpdateAborted)
            assert "00000000deadbeef there; it is not used" in str(ended)
        for instance in at.instances:
            assert served_by(instance) == 1


async def test_the_error_names_a_silent_receiver_after_the_deadline(fabric: str) -> None:
    settings = UpdateSettings(stage_seconds=0.5)
    async with job(fabric, train=TRAIN, infer=INFER, settings=settings) as at:
        instead_of(at.links("i1/0"), Vote, lambda: None)
        for ended in await push(at, 1):
            assert isinstance(ended, WeightUpdateAborted)
            assert "'i1' had not staged after 0.5 s" in str(ended)
        (report, _) = await push(at, 2)
        assert isinstance(report, UpdateReport)
        for instance in at.instances:
            assert served_by(instance) == 2


async def test_a_push_that_is_withdrawn_is_aborted_for_all(fabric: str) -> None:
    async with job(fabric, train=TRAIN, infer=INFER) as at:
        whole = weights(1)
        pushed = [at.senders[0].push(1, boxes(at.senders[0].holdings, whole))]
        staged = asyncio.Event()
        instead_of(at.links("i1/0"), Vote, staged.set)
        pushed.append(at.senders[1].push(1, boxes(at.senders[1].holdings, whole)))
        await pushed[0].read
        await staged.wait()
        await at.senders[0].withdraw(WeightUpdateAborted("the loop was interrupted"))
        with pytest.raises(WeightUpdateAborted, match="the loop was interrupted"):
            await pushed[0].report
        with pytest.raises(WeightUpdateAborted, match="training rank 0 has withdrawn its push"):
            await pushed[1].report
        (report, _) = await push(at, 2)
        assert isinstance(report, UpdateReport)
