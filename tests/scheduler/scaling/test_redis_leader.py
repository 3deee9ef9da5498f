"""The leader's lock on a real Redis."""

from __future__ import annotations

import asyncio
import socket

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvxfer.errors import ControlPlaneUnavailable, NotLeader
from kvxfer.scheduler.ending import end
from kvxfer.scheduler.redis_registry.url import RedisUrl
from kvxfer.scheduler.scaling import redis_leader
from kvxfer.scheduler.scaling.redis_leader import RedisLeader
from verify.polling import eventually
from verify.processes.redis_failover import Watched

pytestmark = pytest.mark.native

LOCK = "kvxfer:{scaling}:leader"


async def expire(redis: Redis) -> None:
    """Ends the time of the lock, as if its holder had been frozen that long."""
    assert await redis.pexpire(LOCK, 0)


def unanswered(port: int) -> Redis:
    return Redis(host="127.0.0.1", port=port, retry=Retry(NoBackoff(), 0))


async def test_one_of_many_leads(redis):
    replicas = [RedisLeader(redis) for _ in range(20)]
    tokens = await asyncio.gather(*(replica.campaign() for replica in replicas))
    assert len([token for token in tokens if token is not None]) == 1


async def test_a_term_is_prolonged_under_its_token(redis):
    leader = RedisLeader(redis, seconds=300)
    token = await leader.campaign()
    await redis.expire(LOCK, 100)
    before = await redis.expiretime(LOCK)
    assert await leader.campaign() == token
    assert await redis.expiretime(LOCK) > before
    await leader.confirm(token)


async def test_lock_ends_by_itself(redis):
    leader = RedisLeader(redis, seconds=0.05)
    token = await leader.campaign()

    async def is_free() -> bool:
        return not await redis.exists(LOCK)

    await eventually(is_free)
    with pytest.raises(NotLeader, match="no replica does"):
        await leader.confirm(token)


async def test_deposed_leader_is_refused_and_later_tokens_are_greater(redis):
    old, new = RedisLeader(redis), RedisLeader(redis)
    first = await old.campaign()
    assert await new.campaign() is None
    await expire(redis)
    second = await new.campaign()
    assert second > first
    with pytest.raises(NotLeader, match=f"token {first} no longer leads"):
        await old.confirm(first)
    await new.confirm(second)
    assert await old.campaign() is None


async def test_a_second_term_of_one_replica_has_another_token(redis):
    leader = RedisLeader(redis)
    first = await leader.campaign()
    await expire(redis)
    second = await leader.campaign()
    assert second > first
    with pytest.raises(NotLeader):
        await leader.confirm(first)


async def test_tokens_ascend_over_a_redis_that_lost_its_data(redis):
    first = await RedisLeader(redis).campaign()
    await redis.flushall()
    second = await RedisLeader(redis).campaign()
    assert second > first


async def test_tokens_ascend_over_a_clock_that_was_set_back(redis):
    far = 4_000_000_000_000_000
    await redis.set("kvxfer:{scaling}:token", far)
    assert await RedisLeader(redis).campaign() == far + 1


async def test_resigning_lets_the_next_one_lead_at_once(redis):
    old, new = RedisLeader(redis), RedisLeader(redis)
    await old.campaign()
    await old.resign()
    assert await new.campaign() is not None
    await old.resign()
    assert await redis.exists(LOCK), "a replica that does not lead has nothing to give up"


async def test_deposed_leader_does_not_resign_for_its_successor(redis):
    old, new = RedisLeader(redis), RedisLeader(redis)
    await old.campaign()
    await expire(redis)
    token = await new.campaign()
    await old.resign()
    await new.confirm(token)


@pytest.mark.realtime
@pytest.mark.parametrize("term", [0.3, 60.0])
async def test_over_a_fail_over_one_replica_acts_at_a_time_and_tokens_ascend(term):
    """A term shorter than the fail-over ends with it; a longer one continues at the new master."""
    acts: list[tuple[int, int]] = []
    refusals: set[str] = set()

    async def take_part(number: int, leader: RedisLeader) -> None:
        async def act() -> None:
            try:
                token = await leader.campaign()
                if token is not None:
                    await leader.confirm(token)
                    acts.append((token, number))
            except (ControlPlaneUnavailable, NotLeader) as refused:
                refusals.add(refused.code)

        await eventually(act, 600)  # again and again, until it is cancelled

    with Watched() as servers:
        clients = [RedisUrl.parse(servers.url).client(timeout=1, prefix="kvxfer") for _ in range(3)]
        leaders = [RedisLeader(client, seconds=term) for client in clients]
        tasks = [asyncio.create_task(take_part(*each)) for each in enumerate(leaders)]
        try:
            await eventually(lambda: len(acts) > 5)
            first, replica = acts[-1]
            with servers.master.client() as client:
                assert client.wait(1, 15_000) == 1
            servers.master.kill()
            with pytest.raises(NotLeader, match="is unknown if token"):
                await leaders[replica].confirm(first)
            before = len(acts)
            await eventually(lambda: len(acts) > before + 5)
        finally:
            for task in tasks:
                await end(task)
        latest, successor = acts[-1]
        # The keys of a new master that did not receive the latest term.
        with servers.standby.client() as client:
            assert client.info("replication")["role"] == "master"
            client.delete(LOCK, "kvxfer:{scaling}:token")
        other = leaders[(successor + 1) % 3]
        third = await other.campaign()
        assert third > latest
        with pytest.raises(NotLeader, match=f"token {latest} no longer leads"):
            await leaders[successor].confirm(latest)
        assert await leaders[successor].campaign() is None
        for leader in leaders:
            await leader.close()

    assert "control-plane-unavailable" in refusals
    tokens = [token for token, _ in acts]
    assert tokens == sorted(tokens)
    assert len(set(acts)) == len(set(tokens)), "each token has one replica"
    assert (latest > first) == (term < 10)


async def test_without_redis_nobody_leads():
    leader = RedisLeader(unanswered(1))
    with pytest.raises(ControlPlaneUnavailable, match="no leader until it does"):
        await leader.campaign()
    with pytest.raises(NotLeader, match="is unknown if token"):
        await leader.confirm(1)


async def test_redis_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(redis_leader, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        leader = RedisLeader(unanswered(silent.getsockname()[1]))
        with pytest.raises(ControlPlaneUnavailable, match=r"nothing within 0\.2 s"):
            await leader.campaign()
        with pytest.raises(NotLeader, match=r"nothing within 0\.2 s"):
            await leader.confirm(1)
