"""Updates in waves: arenas that are smaller than the model, and instances that have some waves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvxfer.errors import InvalidArgument, PeerError, WeightsMismatch, WeightUpdateAborted
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.transfer.links import Links
from kvxfer.weights.transfer.messages import Applied, Commit, Grant, Prepare, Vote
from kvxfer.weights.transfer.settings import UpdateSettings
from kvxfer.weights.transfer.waves import Bounded, waves_of

from .job import SHAPES, job, served_by, shards
from .test_faults import die, instead_of, push

WAVES = UpdateSettings(mode="wave")
TRAIN = [shards(number, 2) for number in range(2)]
INFER = [[shards(rank, 2, 1) for rank in range(2)], [shards(0, 1)]]
ARENA = 16 << 10
"""The bound of an arena for four parameters of 15,360, 160, 10,240 and 11,520 bytes."""


def of(sizes: dict[str, int]) -> Holdings:
    """Returns parameters with these numbers of elements."""
    return Holdings(
        tuple(Holding(name, "uint8", (size,), (0,), (size,)) for name, size in sizes.items())
    )


def waves(sizes: dict[str, int], arena_bytes: int) -> Sequence[Sequence[str]]:
    return waves_of([Bounded("'i0'", of(sizes), arena_bytes)])


# --- the waves of an update


def test_layers_stay_together_in_the_order_of_their_numbers() -> None:
    names = [f"model.layers.{layer}.{name}" for layer in (10, 2, 9) for name in ("up", "down")]
    found = waves({**dict.fromkeys(names, 256), "embed": 256}, 1024)
    assert found == (
        ("embed", "model.layers.2.down", "model.layers.2.up"),
        ("model.layers.9.down", "model.layers.9.up", "model.layers.10.down", "model.layers.10.up"),
    )


def test_a_layer_that_fits_no_wave_is_spread_over_several() -> None:
    assert waves({"layers.0.a": 300, "layers.0.b": 256, "layers.0.c": 512}, 768) == (
        ("layers.0.a", "layers.0.b"),
        ("layers.0.c",),
    )


def test_every_rank_has_room_for_each_wave() -> None:
    ranks = [
        Bounded("'i0'", of({"a": 256, "b": 256, "c": 256}), 1024),
        Bounded("'i1'", of({"b": 512, "c": 256}), 512),
    ]
    assert waves_of(ranks) == (("a", "b"), ("c",))


def test_a_parameter_that_is_too_large_is_named_with_its_size_and_the_bound() -> None:
    with pytest.raises(WeightsMismatch, match="b takes 1280 bytes at 'i0', whose arena_bytes are"):
        waves({"a": 256, "b": 1200}, 1024)


def test_keep_is_refused() -> None:
    with pytest.raises(InvalidArgument, match='policy is "keep", and mode is "wave"'):
        UpdateSettings(mode="wave", policy="keep")


# --- whole updates

native = pytest.mark.native


@native
@pytest.mark.parametrize("digests", [True, False])
async def test_instances_serve_what_has_come_in_waves(fabric: str, digests: bool) -> None:
    settings = UpdateSettings(mode="wave", digests=digests)
    async with job(fabric, train=TRAIN, infer=INFER, settings=settings, arena_bytes=ARENA) as at:
        for instance in at.instances:
            assert all(rank.memory.nbytes <= ARENA for rank in instance.ranks)
        for version in (1, 2, 7):
            (report, again) = await push(at, version)
            assert isinstance(report, UpdateReport)
            assert report == again
            assert (report.state, report.mode, report.waves) == ("committed", "wave", 3)
            assert report.out_of_service == ()
            for instance, told in zip(at.instances, report.instances, strict=True):
                assert instance.waves[-3:] == [(True, False), (False, False), (False, True)]
                assert served_by(instance) == version
                assert all(rank.partial is None for rank in instance.ranks)
                digests_of = [int(rank.digest or "0", 16) for rank in instance.ranks]
                assert told.digest == (f"{sum(digests_of) % 2**64:016x}" if digests else None)


@native
async def test_a_bound_that_fits_the_whole_model_makes_one_wave() -> None:
    async with job("local", train=TRAIN, infer=INFER, settings=WAVES, arena_bytes=1 << 20) as at:
        (report, _) = await push(at, 1)
        assert isinstance(report, UpdateReport)
        assert report.waves == 1
        assert [served_by(instance) for instance in at.instances] == [1, 1]


@native
@pytest.mark.parametrize(
    ("settings", "arena_bytes", "by_message", "why"),
    [
        (UpdateSettings(), ARENA, True, "rank 0 of 'i0' stages 18944 bytes for a whole update"),
        (WAVES, None, True, "rank 0 of 'i0' takes updates without arena_bytes"),
        (WAVES, ARENA, False, "rank 0 of 'i0' takes updates by its engine's control path"),
        (
            *(WAVES, 12 << 10, True),
            "embed takes 15360 bytes at rank 0 of 'i1', whose arena_bytes are 12288",
        ),
    ],
)
async def test_ranks_that_cannot_take_the_mode_are_named(
    settings: UpdateSettings, arena_bytes: int | None, by_message: bool, why: str
) -> None:
    async with job(
        "local",
        train=TRAIN,
        infer=INFER,
        settings=settings,
        arena_bytes=arena_bytes,
        by_message=[by_message] * 2,
    ) as at:
        for ended in await push(at, 1):
            assert isinstance(ended, WeightsMismatch)
            assert why in str(ended)
            assert isinstance(ended.report, UpdateReport)
            assert ended.report.out_of_service == ()


# --- faults


def at_the(nth: int, links: Links, kind: type, act: Callable[[], object]) -> None:
    """Calls `act` instead of sending the nth message of this kind, from 0."""
    send, count = links.send, 0

    def steered(peer: Any, message: Any) -> bool:
        nonlocal count
        if isinstance(message, kind):
            count += 1
            if count == nth + 1:
                act()
                return True
        return send(peer, message)

    links.send = steered  # type: ignore[method-assign]


@native
@pytest.mark.parametrize("stage", [Grant, Vote])
@pytest.mark.parametrize("victim", ["i0/1", "i1/0"])
async def test_a_loss_before_any_wave_was_applied_changes_nothing(
    fabric: str, victim: str, stage: type
) -> None:
    async with job(fabric, train=TRAIN, infer=INFER, settings=WAVES, arena_bytes=ARENA) as at:
        await push(at, 1)
        instead_of(at.links(victim), stage, die(at, victim))
        for ended in await push(at, 2):
            assert isinstance(ended, WeightUpdateAborted)
            assert "instances keep serving the version before" in str(ended)
        left = next(each for each in at.instances if victim.split("/")[0] != each.name)
        assert served_by(left) == 1
        assert left.ranks[0].partial is None


@native
@pytest.mark.parametrize("stage", [Vote, Applied])
async def test_remaining_instances_get_the_update_at_once(fabric: str, stage: type) -> None:
    """An instance is lost while a wave in the middle is staged, or while it applies that wave."""
    async with job(fabric, train=TRAIN, infer=INFER, settings=WAVES, arena_bytes=ARENA) as at:
        await push(at, 1)
        at_the(1, at.links("i1/0"), stage, die(at, "i1/0"))
        (report, again) = await push(at, 2)
        assert isinstance(report, UpdateReport)
        assert report == again
        assert served_by(at.instances[0]) == 2
        assert at.instances[0].ranks[0].partial is None
        if stage is Applied:
            assert report.out_of_service == ("i1",)
            assert [each.state for each in report.instances] == ["committed", "lost"]


@native
async def test_a_loss_at_the_last_wave_leaves_instances_out_of_service(fabric: str) -> None:
    """The training ranks may change their parameters by then. The next update brings the instances
    back."""
    async with job(fabric, train=TRAIN, infer=INFER, settings=WAVES, arena_bytes=ARENA) as at:
        await push(at, 1)
        at_the(2, at.links("i1/0"), Vote, die(at, "i1/0"))
        for ended in await push(at, 2):
            assert isinstance(ended, WeightUpdateAborted)
            assert "'i0' is out of service until the next one" in str(ended)
            assert ended.report is not None
            assert ended.report.out_of_service == ("i0",)
            assert [each.version for each in ended.report.instances] == [None]
        leader = at.instances[0].ranks[0]
        assert leader.version == 1
        assert "it has 2 of 3 waves of version 2" in str(leader.partial)
        (report, _) = await push(at, 2)
        assert isinstance(report, UpdateReport)
        assert report.out_of_service == ()
        assert served_by(at.instances[0]) == 2
        assert leader.partial is None


@native
async def test_an_instance_that_fails_at_a_wave_is_brought_back(fabric: str) -> None:
    async with job(fabric, train=TRAIN, infer=INFER, settings=WAVES, arena_bytes=ARENA) as at:
        await push(at, 1)
        at.instances[1].fails = True
        (report, _) = await push(at, 2)
        assert isinstance(report, UpdateReport)
        assert [(each.state, each.version) for each in report.instances] == [
            ("committed", 2),
            ("partial", None),
        ]
        assert "out of paper" in str(report.instances[1].error)
        assert report.out_of_service == ("i1",)
        assert "out of paper" in str(at.instances[1].ranks[0].partial)
        assert served_by(at.instances[0]) == 2
        at.instances[1].fails = False
        (report, _) = await push(at, 3)
        assert isinstance(report, UpdateReport)
        assert report.out_of_service == ()
        assert [served_by(instance) for instance in at.instances] == [3, 3]


@native
async def test_a_training_rank_that_is_lost_between_waves_leaves_all_out_of_service(
    fabric: str,
) -> None:
    async with job(fabric, train=TRAIN, infer=INFER, settings=WAVES, arena_bytes=ARENA) as at:
        await push(at, 1)
        at_the(3, at.links("coordinator"), Prepare, die(at, "t1"))
        (ended, _) = await push(at, 2)
        assert isinstance(ended, WeightUpdateAborted)
        assert "training rank 1" in str(ended)
        assert ended.report is not None
        assert ended.report.out_of_service == ("i0", "i1")
        for instance in at.instances:
            assert all(rank.partial and rank.version == 1 for rank in instance.ranks)


@native
@pytest.mark.parametrize("told", [0, 1])
async def test_leaders_that_lose_the_coordinator_at_the_last_wave_agree(
    fabric: str, told: int
) -> None:
    async with job(fabric, train=TRAIN, infer=INFER, settings=WAVES, arena_bytes=ARENA) as at:
        await push(at, 1)
        links = at.links("coordinator")
        send, orders = links.send, []

        def steered(peer: Any, message: Any) -> bool:
            if not isinstance(message, Commit) or "." in message.update_id:
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
            if told:
                assert served_by(instance) == 2
            else:
                assert instance.ranks[0].version == 1
            assert (instance.ranks[0].partial is None) == bool(told)


@native
async def test_a_coordinator_that_is_lost_between_waves_leaves_all_out_of_service(
    fabric: str,
) -> None:
    async with job(fabric, train=TRAIN, infer=INFER, settings=WAVES, arena_bytes=ARENA) as at:
        await push(at, 1)
        at_the(3, at.links("coordinator"), Prepare, die(at, "coordinator"))
        assert all(isinstance(each, PeerError) for each in await push(at, 2))
        await at.settled()
        for instance in at.instances:
            assert instance.ranks[0].partial is not None
            assert instance.ranks[0].version == 1


def test_the_parameters_of_the_job_make_three_waves() -> None:
    assert waves_of([Bounded("'i1'", shards(0, 1), ARENA)]) == (
        ("down",),
        ("embed", "norm"),
        ("q_proj",),
    )
    assert SHAPES.keys() == {"down", "embed", "norm", "q_proj"}
