"""The control loop: which replica decides and applies, and what a failed round leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from kubernetes_asyncio.client import Configuration

from kvxfer.errors import ControlPlaneUnavailable, KvxferError, NotLeader, ScalingFailed
from kvxfer.instances import InstanceState, Load, Role
from kvxfer.scaling import ScalePlan
from kvxfer.scheduler.choice import make_leader
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.scaling.autoscaler import Autoscaler
from kvxfer.scheduler.scaling.backend import Fence, ScalingBackend
from kvxfer.scheduler.scaling.kubernetes import KubernetesBackend
from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy
from kvxfer.scheduler.scaling.redis_leader import RedisLeader
from tests.virtual_time import VirtualClock, passes
from verify.processes.control_plane import worker
from verify.processes.redis_server import RedisServer

from .kubernetes_api import TOKEN, KubernetesApi, running
from .test_kubernetes import CONFIG, LWS
from .test_redis_leader import unanswered

POLICY = ScalingPolicy(
    interval=10,
    stable_down=100,
    cooldown_up=0,
    prefill=RolePolicy(requests=4, max=6),
    decode=RolePolicy(requests=10, max=6),
)


class Workers(ScalingBackend):
    """A backend that keeps the count of each role and the changes that were made."""

    name = "counts"

    def __init__(self) -> None:
        self.counts = {Role.PREFILL: 1, Role.DECODE: 1}
        self.writes: list[tuple[Role, int]] = []
        self.away = False
        self.read_only: set[Role] = set()

    async def requested(self, role: Role) -> int:
        if self.away:
            raise ScalingFailed(f"{role} workers cannot be counted")
        return self.counts[role]

    async def scale(self, role: Role, wanted: int, fence: Fence) -> None:
        await fence()
        if role in self.read_only:
            raise ScalingFailed(f"{role} workers cannot be changed")
        self.counts[role] = wanted
        self.writes.append((role, wanted))

    async def close(self) -> None:
        pass


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
async def registry(clock: VirtualClock) -> AsyncIterator[EmbeddedRegistry]:
    """One prefill worker with 7 requests, one decode worker with none."""
    registry = EmbeddedRegistry(LeasePolicy(10_000), clock=clock)
    for name, role in (("p", "prefill"), ("d", "decode")):
        lease = await registry.register(worker(name, role), state=InstanceState.READY)
        if role == "prefill":
            await registry.heartbeat("p", lease.epoch, load=Load(running=7))
    yield registry
    await registry.close()


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi()
    api.add("prefill", 1)
    api.add("decode", 1, kind=LWS)
    async with running(api):
        yield api


def kubernetes(api: KubernetesApi) -> KubernetesBackend:
    cluster = Configuration(host=api.url)
    cluster.api_key["BearerToken"] = f"Bearer {TOKEN}"
    return KubernetesBackend(cluster, CONFIG, namespace="llm")


async def test_dry_run_decides_and_applies_nothing(registry, clock):
    autoscaler = Autoscaler(registry, POLICY, policy_name="here.yaml", clock=clock)
    plan = await autoscaler.round()
    assert (plan.prefill.current, plan.prefill.wanted, plan.decode.wanted) == (1, 2, 1)
    assert (plan.backend, plan.leads, plan.policy) == ("none", True, "here.yaml")
    assert plan.at == clock.unix()


async def test_plan_changes_no_state(registry, clock):
    autoscaler = Autoscaler(registry, POLICY, clock=clock)
    for _ in range(3):
        assert (await autoscaler.plan()).observed_seconds == 0
        clock.advance(50)
    await autoscaler.round()
    clock.advance(50)
    assert (await autoscaler.plan()).observed_seconds == 50


async def test_leader_applies_its_decisions(registry, clock, workers):
    autoscaler = Autoscaler(registry, POLICY, backend=workers, clock=clock)
    plan = await autoscaler.round()
    assert (plan.backend, plan.leads, plan.prefill.wanted) == ("counts", True, 2)
    assert workers.writes == [("prefill", 2)]
    assert (await autoscaler.round()).prefill.direction == "hold", "two were asked for already"
    await autoscaler.close()


@pytest.mark.native
async def test_leader_applies_its_decisions_to_kubernetes(registry, clock, api):
    autoscaler = Autoscaler(registry, POLICY, backend=kubernetes(api), clock=clock)
    plan = await autoscaler.round()
    assert (plan.backend, plan.leads, plan.prefill.wanted) == ("kubernetes", True, 2)
    assert api.writes == [("prefill", 2)]
    assert (await autoscaler.round()).prefill.direction == "hold", "two were asked for already"
    await autoscaler.close()


async def test_workers_are_removed_after_the_stable_time(registry, clock, workers):
    workers.counts[Role.DECODE] = 4
    autoscaler = Autoscaler(registry, POLICY, backend=workers, clock=clock)
    await autoscaler.round()
    clock.advance(99)
    await autoscaler.round()
    assert workers.counts[Role.DECODE] == 4
    clock.advance(1)
    await autoscaler.round()
    assert workers.counts[Role.DECODE] == 3
    await autoscaler.close()


@pytest.mark.native
async def test_only_the_leader_applies_and_a_follower_takes_over_with_its_own_history(
    registry, clock, workers, redis
):
    workers.counts[Role.DECODE] = 3
    first, second = (
        Autoscaler(registry, POLICY, backend=workers, leader=RedisLeader(redis), clock=clock)
        for _ in range(2)
    )
    assert (await first.round()).leads
    follower = await second.round()
    assert (follower.leads, follower.decode.current) == (False, 3)
    clock.advance(100)
    await first.close()
    assert (await second.round()).leads
    assert workers.counts[Role.DECODE] == 2, "it has seen the 100 s itself"
    await second.close()


@pytest.mark.native
async def test_deposed_leader_in_the_middle_of_a_round_writes_nothing(registry, clock, api, redis):
    class Deposing(RedisLeader):
        """A leader that loses its lock between its campaign and its first write."""

        async def campaign(self) -> int | None:
            token = await super().campaign()
            await redis.pexpire("kvxfer:{scaling}:leader", 0)
            self.successor = RedisLeader(redis)
            assert await self.successor.campaign()
            return token

    autoscaler = Autoscaler(
        registry, POLICY, backend=kubernetes(api), leader=Deposing(redis), clock=clock
    )
    with pytest.raises(NotLeader):
        await autoscaler.round()
    assert api.writes == []
    assert not (await autoscaler.plan()).leads
    await autoscaler.close()


async def test_failed_rounds_are_logged_once_and_retried(registry, clock, workers, caplog):
    workers.away = True
    autoscaler = Autoscaler(registry, POLICY, backend=workers, clock=clock)
    plans: list[float] = []
    failures: list[KvxferError | TimeoutError] = []
    began = clock.unix()
    loop = asyncio.create_task(
        autoscaler.run(lambda plan: plans.append(plan.at - began), failures.append)
    )
    await passes(25)
    assert (len(failures), plans, workers.writes) == (3, [], [])
    workers.away = False
    await passes(20)
    loop.cancel()
    assert plans == [30, 40]
    assert workers.writes == [("prefill", 2)]
    assert all(isinstance(failure, ScalingFailed) for failure in failures)
    assert caplog.text.count("prefill workers cannot be counted") == 1
    await autoscaler.close()


async def test_a_round_without_end_is_given_up_and_the_next_one_tried(
    registry, clock, workers, monkeypatch
):
    hangs = [True, False]
    requested = workers.requested

    async def answers(role: Role) -> int:
        if hangs[0]:
            await asyncio.Event().wait()
        return await requested(role)

    monkeypatch.setattr(workers, "requested", answers)
    autoscaler = Autoscaler(registry, POLICY, backend=workers, clock=clock)
    plans: list[ScalePlan] = []
    failures: list[KvxferError | TimeoutError] = []
    loop = asyncio.create_task(autoscaler.run(plans.append, failures.append))
    await passes(29.9)
    assert not failures
    await passes(0.2)
    assert [type(failure) for failure in failures] == [TimeoutError]
    hangs.pop(0)
    await passes(10)
    loop.cancel()
    assert len(plans) == 1
    await autoscaler.close()


async def test_a_role_that_cannot_be_scaled_does_not_block_the_other_one(registry, clock, workers):
    workers.counts[Role.DECODE] = 8
    workers.read_only.add(Role.PREFILL)
    autoscaler = Autoscaler(registry, POLICY, backend=workers, clock=clock)
    with pytest.raises(ScalingFailed, match="prefill workers cannot be changed"):
        await autoscaler.round()
    assert workers.writes == [("decode", 6)], "max is 6"
    await autoscaler.close()


@pytest.mark.native
async def test_without_redis_nothing_is_applied(registry, clock, workers):
    leader = RedisLeader(unanswered(1))
    autoscaler = Autoscaler(registry, POLICY, backend=workers, leader=leader, clock=clock)
    with pytest.raises(ControlPlaneUnavailable):
        await autoscaler.round()
    assert workers.writes == []
    assert (await autoscaler.plan()).prefill.wanted == 2, "the plan needs no leader"
    await autoscaler.close()


@pytest.mark.realtime
async def test_leader_whose_redis_is_killed_does_not_lead_until_redis_is_back(
    registry, clock, workers
):
    with RedisServer() as server:
        leader = make_leader(server.url, interval=POLICY.interval)
        autoscaler = Autoscaler(registry, POLICY, backend=workers, leader=leader, clock=clock)
        assert (await autoscaler.round()).leads
        before = await leader.campaign()
        server.kill()
        with pytest.raises(ControlPlaneUnavailable):
            await autoscaler.round()
        assert not (await autoscaler.plan()).leads
        server.start()
        assert (await autoscaler.round()).leads
        assert await leader.campaign() > before
        await autoscaler.close()


@pytest.mark.realtime
async def test_nothing_is_scaled_from_a_stale_view_of_the_fleet(clock, workers):
    with RedisServer() as server:
        registry = RedisRegistry(server.url, LeasePolicy(10_000), clock=clock, timeout=10)
        await registry.open()
        for name, role in (("p", "prefill"), ("d", "decode")):
            lease = await registry.register(worker(name, role), state=InstanceState.READY)
            await registry.heartbeat(name, lease.epoch, load=Load(running=7))
        autoscaler = Autoscaler(registry, POLICY, backend=workers, clock=clock)
        server.kill()
        with pytest.raises(ControlPlaneUnavailable, match="the registry is unavailable"):
            await autoscaler.round()
        assert workers.writes == []
        assert (await autoscaler.plan()).prefill.wanted == 2, "the plan uses what was known"
        await autoscaler.close()
        await registry.close()


@pytest.mark.native
@pytest.mark.parametrize(("interval", "seconds"), [(1, 30), (60, 180)])
async def test_term_outlives_a_round_that_is_late(empty_redis, redis, interval, seconds):
    leader = make_leader(empty_redis.url, interval=interval)
    before, _ = await redis.time()
    assert await leader.campaign()
    after, _ = await redis.time()
    until = await redis.pexpiretime("kvxfer:{scaling}:leader") / 1000
    assert before + seconds <= until <= after + 1 + seconds
    await leader.close()


async def test_requested_is_what_the_backend_was_asked_for(registry, clock, workers):
    workers.counts[Role.PREFILL] = 5
    autoscaler = Autoscaler(registry, POLICY, backend=workers, clock=clock)
    assert (await autoscaler.plan()).prefill.current == 5
    await autoscaler.close()
