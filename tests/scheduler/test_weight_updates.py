"""Weight updates: what every implementation of the registry promises, and replicas."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvxfer.errors import (
    ControlPlaneUnavailable,
    InvalidArgument,
    OldVersion,
    UnknownInstance,
    UnknownWeightUpdate,
    WeightUpdateDecided,
    WeightUpdateExists,
)
from kvxfer.model_identity import ModelIdentity
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.registry import Registry
from kvxfer.weight_updates import (
    MAX_ENDED_UPDATES,
    AnnounceUpdate,
    Decision,
    PartReport,
    PartState,
    ReportUpdate,
    UpdateError,
    UpdatePart,
    UpdatePolicy,
    UpdateState,
    WeightUpdate,
)
from verify.processes.control_plane import worker
from verify.processes.redis_server import RedisServer

from .redis_replica import replica

SECONDS = 4.0
COMMIT, ABORT = Decision.COMMIT, Decision.ABORT
STAGED = PartState.STAGED


def serving(version: int) -> ModelIdentity:
    return ModelIdentity(checkpoint="c", weights_version=version)


async def announce(
    registry: Registry, version: int = 7, *, update_id: str | None = "u", **changes: Any
) -> WeightUpdate:
    asked = {"update_id": update_id, "model": "llama", "version": version, **changes}
    return (await registry.announce_update(AnnounceUpdate(**asked), seconds=SECONDS)).after


async def report(registry: Registry, update_id: str = "u", **news: Any) -> WeightUpdate:
    return (await registry.report_update(update_id, ReportUpdate(**news))).after


async def decide(registry: Registry, decision: Decision, update_id: str = "u") -> WeightUpdate:
    return (await registry.decide_update(update_id, decision)).after


@pytest.fixture
async def two(fleet):
    """A fleet of two instances that serve version 6, and one of another model."""
    for name in ("a", "b"):
        await fleet.join(name, identity=serving(6))
    await fleet.join("other", model="qwen")
    return fleet


# --- announcing ------------------------------------------------------------------------------


async def test_an_update_is_of_all_live_instances_of_its_model(two):
    epochs = {i.instance_id: i.epoch for i in await two.registry.instances()}
    now = two.clock.unix()
    update = await announce(two.registry, policy=UpdatePolicy.KEEP)
    assert update == WeightUpdate(
        update_id="u",
        model="llama",
        version=7,
        policy=UpdatePolicy.KEEP,
        state=UpdateState.STAGING,
        started_at=now,
        lease_seconds=SECONDS,
        instances=(
            UpdatePart(instance_id="a", epoch=epochs["a"], version=6),
            UpdatePart(instance_id="b", epoch=epochs["b"], version=6),
        ),
    )
    assert await two.registry.update("u") == update
    assert await two.registry.updates() == (update,)
    assert await two.registry.updates("qwen") == ()


async def test_only_the_instances_that_are_named_take_part(two):
    update = await announce(two.registry, instances=("b",))
    assert [part.instance_id for part in update.instances] == ["b"]
    with pytest.raises(UnknownInstance, match="'x'"):
        await announce(two.registry, update_id="v", model="qwen", instances=("x",))
    with pytest.raises(InvalidArgument, match="'a' is of model 'llama', and the update of 'qwen'"):
        await announce(two.registry, update_id="v", model="qwen", instances=("a",))
    with pytest.raises(InvalidArgument, match="no instance of model 'none' is registered"):
        await announce(two.registry, update_id="v", model="none")


@pytest.mark.parametrize("version", [1, 6])
async def test_a_version_must_be_greater_than_all_that_are_served(two, version):
    with pytest.raises(OldVersion, match="serves weights version 6; announce a greater") as refusal:
        await announce(two.registry, version)
    assert refusal.value.details["served"] == 6
    assert await two.registry.updates() == ()


async def test_each_model_has_at_most_one_update_under_way(two):
    await announce(two.registry)
    with pytest.raises(WeightUpdateExists, match="'u' of model 'llama' to version 7 is staging"):
        await announce(two.registry, 8, update_id="v")
    await announce(two.registry, 1, update_id="w", model="qwen")
    await decide(two.registry, ABORT)
    await announce(two.registry, 7, update_id="v")
    assert [u.update_id for u in await two.registry.updates("llama")] == ["v", "u"]


async def test_repeated_announcement_is_the_same_update(two):
    update = await announce(two.registry)
    await report(two.registry, bytes=5)
    again = await announce(two.registry)
    assert (again.started_at, again.bytes) == (update.started_at, 5)
    assert await announce(two.registry, instances=("b", "a")) == again
    for changes in ({"version": 8}, {"policy": UpdatePolicy.KEEP}, {"instances": ("a",)}):
        with pytest.raises(WeightUpdateExists, match="take a new update_id"):
            await announce(two.registry, **changes)
    await decide(two.registry, ABORT)
    with pytest.raises(WeightUpdateExists, match="is aborted; take a new update_id"):
        await announce(two.registry)


async def test_without_an_id_the_registry_makes_one(two):
    update = await announce(two.registry, update_id=None)
    assert len(update.update_id) == 32
    assert await two.registry.update(update.update_id) == update


async def test_only_one_of_many_concurrent_announcements_wins(two):
    outcomes = await asyncio.gather(
        *(announce(two.registry, update_id=f"u{number}") for number in range(8)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, WeightUpdate) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, WeightUpdateExists) for outcome in outcomes) == 7
    assert len(await two.registry.updates()) == 1


# --- reports ---------------------------------------------------------------------------------


async def test_reports_of_instances_are_kept_and_states_only_move_forward(two):
    await announce(two.registry)
    digest = "0123456789abcdef"
    await report(
        two.registry,
        bytes=1 << 40,
        instances=(PartReport(instance_id="b", state=STAGED, digest=digest),),
    )
    update = await report(
        two.registry, instances=(PartReport(instance_id="b", state=PartState.RECEIVING),)
    )
    a, b = update.instances
    assert (a.state, b.state, b.digest, b.version) == (PartState.RECEIVING, STAGED, digest, 6)
    assert update.bytes == 1 << 40
    lost = PartReport(
        instance_id="a", state=PartState.LOST, error=UpdateError(code="peer-lost", message="gone")
    )
    await report(two.registry, instances=(lost,))
    update = await report(two.registry, instances=(PartReport(instance_id="a", state=STAGED),))
    assert update.instances[0].state is PartState.LOST
    assert update.instances[0].error == lost.error
    assert await two.registry.update("u") == update


async def test_a_whole_update_from_its_announcement_to_its_end(two):
    begun = (await announce(two.registry)).started_at
    await two.pass_time(2.0)
    update = await decide(two.registry, COMMIT)
    assert (update.state, update.decision) == (UpdateState.COMMITTING, COMMIT)
    assert update.decided_at == pytest.approx(begun + 2)
    await two.pass_time(1.0)
    served = (
        PartReport(instance_id=name, state=PartState.COMMITTED, version=7, pause_seconds=0.2)
        for name in ("a", "b")
    )
    update = await report(two.registry, state="committed", instances=tuple(served))
    assert (update.state, update.error, update.under_way) == (UpdateState.COMMITTED, None, False)
    assert update.ended_at == pytest.approx(begun + 3)
    assert {(p.version, p.pause_seconds) for p in update.instances} == {(7, 0.2)}
    assert (await two.registry.statistics()).updates_ended == {UpdateState.COMMITTED: 1}


async def test_an_instance_that_takes_no_part_is_named(two):
    await announce(two.registry)
    with pytest.raises(InvalidArgument, match="'other' takes no part in update 'u'"):
        await report(two.registry, instances=(PartReport(instance_id="other"),))


async def test_an_unknown_update_is_named(fleet):
    for call in (
        lambda: report(fleet.registry),
        lambda: decide(fleet.registry, ABORT),
        lambda: fleet.registry.update("u"),
    ):
        with pytest.raises(UnknownWeightUpdate, match="'u' is known"):
            await call()


async def test_the_coordinator_says_why_it_aborts(two):
    await announce(two.registry)
    error = UpdateError(code="digest-mismatch", message="rank 1 of 'b'")
    update = await report(two.registry, state="aborted", error=error)
    assert (update.state, update.decision, update.error) == (UpdateState.ABORTED, ABORT, error)
    assert await report(two.registry, state="aborted") == update


# --- decisions -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", Decision)
@pytest.mark.parametrize("later", Decision)
async def test_the_first_decision_holds_for_all(two, first, later):
    await announce(two.registry)
    update = await decide(two.registry, first)
    await two.pass_time(1.0)
    assert await decide(two.registry, later) == update
    assert update.decision is first


@pytest.mark.parametrize("decisions", range(10))
async def test_concurrent_decisions_all_get_the_same_answer(two, decisions):
    seed = 1000 + decisions
    print("seed", seed)
    wanted = random.Random(seed).choices(list(Decision), k=6)
    await announce(two.registry)
    updates = await asyncio.gather(*(decide(two.registry, each) for each in wanted))
    (held,) = {update.decision for update in updates}
    assert held in wanted
    assert (await two.registry.update("u")).decision is held


@pytest.mark.parametrize(("decision", "told"), [(COMMIT, "aborted"), (ABORT, "committed")])
async def test_no_update_ends_against_its_decision(two, decision, told):
    await announce(two.registry)
    await decide(two.registry, decision)
    with pytest.raises(WeightUpdateDecided, match=f"cannot be {told}: it was decided to"):
        await report(two.registry, state=told)
    assert (await two.registry.update("u")).decision is decision


async def test_a_report_of_the_end_is_the_decision_if_there_is_none(two):
    await announce(two.registry)
    update = await report(two.registry, state="committed")
    assert (update.decision, update.state) == (COMMIT, UpdateState.COMMITTED)
    assert (await decide(two.registry, ABORT)).decision is COMMIT


# --- leases ----------------------------------------------------------------------------------


async def test_an_update_whose_coordinator_is_silent_is_aborted(two):
    await announce(two.registry)
    for _ in range(3):
        await two.pass_time(SECONDS - 1)
        assert (await report(two.registry)).under_way
    await two.pass_time(SECONDS)
    update = await two.registry.update("u")
    assert (update.state, update.decision) == (UpdateState.ABORTED, ABORT)
    assert update.error is not None
    assert update.error.code == "lease-expired"
    assert update.error.message == "its coordinator has reported nothing for 4 s"
    assert (await decide(two.registry, COMMIT)).decision is ABORT
    with pytest.raises(WeightUpdateDecided):
        await report(two.registry, state="committed")
    assert (await two.registry.statistics()).updates_ended == {UpdateState.ABORTED: 1}
    await two.join("c")
    await announce(two.registry, update_id="v")


async def test_the_lease_has_ended_for_the_first_call_after_it(two):
    await announce(two.registry)
    await two.pass_time(SECONDS - 0.5)
    two.clock.advance(0.5)
    assert (await decide(two.registry, COMMIT)).decision is ABORT


@pytest.mark.native
async def test_time_in_which_no_coordinator_could_report_does_not_count(clock, empty_redis):
    async with replica(empty_redis, clock=clock) as registry:
        await registry.register(worker("a"))
        await announce(registry)
        clock.advance(10 * SECONDS)
        assert (await registry.update("u")).under_way
    embedded = EmbeddedRegistry(LeasePolicy(60), clock=clock, silence_seconds=1)
    await embedded.register(worker("a"))
    await announce(embedded)
    clock.advance(10 * SECONDS)
    assert (await embedded.update("u")).under_way


async def test_an_update_that_was_decided_to_commit_is_never_aborted(two):
    await announce(two.registry)
    await two.pass_time(SECONDS - 1)
    await decide(two.registry, COMMIT)
    await two.pass_time(SECONDS - 1)
    assert (await two.registry.update("u")).state is UpdateState.COMMITTING
    for _ in range(3):
        await decide(two.registry, ABORT)  # a query renews no lease
        await two.pass_time(0.5)
    update = await two.registry.update("u")
    assert (update.state, update.decision) == (UpdateState.COMMITTED, COMMIT)
    assert update.error is not None
    assert "since it was decided to commit" in update.error.message
    late = PartReport(instance_id="a", state=PartState.COMMITTED, version=7)
    assert (await report(two.registry, instances=(late,))).instances[0].version == 7


async def test_the_oldest_ended_updates_are_forgotten(two):
    count = MAX_ENDED_UPDATES + 3
    for number in range(count):
        await announce(two.registry, update_id=f"u{number}")
        two.clock.advance(0.01)
        await decide(two.registry, ABORT, f"u{number}")
    await announce(two.registry, update_id="last")
    kept = [update.update_id for update in await two.registry.updates()]
    assert kept == ["last", *(f"u{number}" for number in range(count - 1, 2, -1))]
    with pytest.raises(UnknownWeightUpdate):
        await decide(two.registry, ABORT, "u0")


# --- replicas --------------------------------------------------------------------------------


@pytest.mark.native
async def test_replicas_agree_and_so_does_one_that_starts_later(
    empty_redis: RedisServer,
) -> None:
    async with replica(empty_redis) as first, replica(empty_redis) as second:
        await first.register(worker("a"))
        await announce(first)
        await report(second, instances=(PartReport(instance_id="a", state=STAGED),))
        with pytest.raises(WeightUpdateExists):
            await announce(second, update_id="v")
        decisions = await asyncio.gather(
            *(decide(each, wanted) for each in (first, second) for wanted in (COMMIT, ABORT))
        )
        assert len({update.decision for update in decisions}) == 1
        await report(first, bytes=9)
        async with replica(empty_redis) as third:
            told = [await each.updates() for each in (first, second, third)]
    assert told[0] == told[1] == told[2]
    assert told[0][0].instances[0].state is STAGED
    assert told[0][0].bytes == 9


@pytest.mark.native
async def test_a_damaged_update_fails_only_its_step(empty_redis: RedisServer) -> None:
    async with replica(empty_redis) as registry:
        await registry.register(worker("a"))
        await announce(registry)
        with empty_redis.client() as client:
            good = client.hget("kvxfer:updates", "u")
            client.hset("kvxfer:updates", "u", b"\xc1")
            said = "weight update 'u' in Redis is damaged"
            with pytest.raises(ControlPlaneUnavailable, match=said):
                await decide(registry, COMMIT)
            client.hset("kvxfer:updates", "u", good)
        assert (await decide(registry, COMMIT)).decision is COMMIT


@pytest.mark.native
async def test_a_step_is_repeated_if_another_replica_was_faster(
    empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(empty_redis) as first, replica(empty_redis) as second:
        await first.register(worker("a"))
        read, take = first._link.field, first._take_update

        async def announced_meanwhile(was: bytes, update: WeightUpdate) -> bool:
            monkeypatch.undo()
            await announce(second, update_id="faster")
            return await take(was, update)

        monkeypatch.setattr(first, "_take_update", announced_meanwhile)
        with pytest.raises(WeightUpdateExists, match="update 'faster'"):
            await announce(first, update_id="slower")

        async def decided_meanwhile(key: str, name: str) -> bytes | None:
            monkeypatch.undo()
            found = await read(key, name)
            await decide(second, ABORT, "faster")
            return found

        monkeypatch.setattr(first._link, "field", decided_meanwhile)
        assert (await decide(first, COMMIT, "faster")).decision is ABORT
        assert (await second.update("faster")).decision is ABORT
