"""The keys and commands that a registry uses in Redis: one prefix, and a documented list."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from kvxfer.clock import SystemClock
from kvxfer.errors import ControlPlaneUnavailable, InvalidArgument
from kvxfer.instances import BlockUpdate, InstanceState, Load, Role, Traffic
from kvxfer.scheduler.choice import make_leader
from kvxfer.scheduler.keyspace import Keyspace
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest
from kvxfer.weight_updates import AnnounceUpdate
from verify.polling import eventually
from verify.processes.block_tables import block_table
from verify.processes.control_plane import worker
from verify.processes.redis_failover import Clustered
from verify.processes.redis_server import RedisServer

from .redis_replica import replica

pytestmark = pytest.mark.native

READY = InstanceState.READY


async def every_step(registry: RedisRegistry) -> None:
    lease = await registry.register(worker("p", labels={"zone": "z"}), state=READY)
    await registry.register(worker("d", Role.DECODE), state=READY)
    sent = (Traffic(to="d", fabric="tcp", bytes_per_second=1.0),)
    await registry.heartbeat("p", lease.epoch, load=Load(sent=sent))
    await registry.publish_blocks("p", lease.epoch, BlockUpdate(added=(1, 2)))
    request = TransferRequest(transfer_id="t")
    for _ in range(2):
        opened = await open_transfer(registry, request, seconds=60, clock=SystemClock())
    await registry.put_block_table("t", block_table())
    await registry.block_table("t")
    await registry.announce_update(
        AnnounceUpdate(update_id="u", model="llama", version=1), seconds=60
    )
    assert await registry.sent() == {"p": sent}
    assert await registry.transfers() == (opened,)
    assert (await registry.statistics()).transfers_opened == 1
    registry._abandoned.add("t")
    await registry._release_abandoned()
    await registry.drain("d", seconds=1)
    await registry.change_role("d", Role.BOTH)
    await registry.deregister("p", lease.epoch)
    assert [each.instance_id for each in await registry.instances()] == ["d"]


async def leads(url: str, prefix: str) -> None:
    leader = make_leader(url, interval=1, keyspace=Keyspace(prefix))
    token = await leader.campaign()
    assert token is not None
    assert await leader.campaign() == token
    await leader.confirm(token)
    await leader.resign()
    await leader.close()


@pytest.mark.parametrize("prefix", ["kvxfer", "{kvxfer}", "llm:east"])
async def test_every_key_begins_with_the_prefix(empty_redis, prefix):
    async with replica(empty_redis, prefix=prefix) as registry:
        await every_step(registry)
    leader = make_leader(empty_redis.url, interval=1, keyspace=Keyspace(prefix))
    assert await leader.campaign()
    with empty_redis.client() as client:
        keys = [key.decode() for key in client.scan_iter()]
    assert len(keys) > 10
    assert [key for key in keys if not key.startswith(f"{prefix}:")] == []
    await leader.close()


async def test_fleets_of_different_prefixes_share_one_redis(empty_redis):
    async with (
        replica(empty_redis, prefix="a") as one,
        replica(empty_redis, prefix="b") as other,
    ):
        await every_step(one)
        assert await other.instances() == ()
        await every_step(other)
        await one.register(worker("q"), state=READY)
        assert [each.instance_id for each in await other.instances()] == ["d"]


async def test_a_user_that_may_access_only_keys_with_the_prefix_is_enough():
    with RedisServer() as server:
        with server.client() as client:
            client.execute_command(
                "ACL", "SETUSER", "cp", "on", ">word", "~kvxfer:*", "+@all", "-@admin"
            )
        url = f"redis://cp:word@127.0.0.1:{server.port}/0"
        async with replica(url) as registry:
            await every_step(registry)
        await leads(url, "kvxfer")
        async with replica(url, prefix="other", timeout=5, there=False) as registry:

            async def refused() -> bool:
                with pytest.raises(ControlPlaneUnavailable) as said:
                    await registry.register(worker("p"))
                return "no permissions" in str(said.value) and "delete" not in str(said.value)

            await eventually(refused)


async def test_in_a_redis_cluster_every_step_and_the_election_go_to_one_node():
    user = ("--user", "cp", "on", ">word", "~{kvxfer}:*", "+@all", "-@admin")
    with Clustered(*user) as servers:
        url = servers.url.replace("://", "://cp:word@")
        async with replica(url, prefix="{kvxfer}") as registry:
            await every_step(registry)
        await leads(url, "{kvxfer}")
        with servers.master.client() as client:
            assert client.dbsize() > 10
        for node in servers.nodes:
            if node not in (servers.master, servers.standby):
                with node.client() as client:
                    assert client.dbsize() == 0


@pytest.mark.parametrize("prefix", ["", "a b", "{a}b", "{", "x" * 65, "é", "a*"])
def test_an_invalid_prefix_is_refused(prefix):
    with pytest.raises(InvalidArgument, match="registry_prefix"):
        Keyspace(prefix)


async def test_the_commands_used_are_those_of_the_documentation(server_of_its_own):
    """A user, or a server that speaks for Redis, needs no other commands."""
    with server_of_its_own.client() as client:
        client.config_resetstat()
    async with replica(server_of_its_own) as registry:
        await every_step(registry)
        with server_of_its_own.client() as client:
            client.script_flush()
        await registry.sweep()
        async with replica(server_of_its_own) as late:
            await eventually(lambda: _is_whole(late))
    await leads(server_of_its_own.url, "kvxfer")
    with server_of_its_own.client() as client:
        stats = client.info("commandstats")
    used = {name.removeprefix("cmdstat_").partition("|")[0].upper() for name in stats}
    lua = files("kvxfer.scheduler.redis_registry") / "lua"
    for script in lua.iterdir():
        used |= set(re.findall(r"redis\.call\(\s*'([A-Z]+)'", script.read_text(encoding="utf-8")))
    used -= {"CONFIG", "SCRIPT", "INFO"}  # only this test uses them
    assert used == listed_commands()


async def _is_whole(registry: RedisRegistry) -> bool:
    return not registry._follower._without_blocks


def listed_commands() -> set[str]:
    page = Path(__file__, "../../../docs/redis.md").resolve().read_text(encoding="utf-8")
    (listed,) = re.findall(r"Commands.\*\* The control plane uses (.*?)\.", page, re.DOTALL)
    return set(re.findall(r"[A-Z]+", listed))


@pytest.fixture
def server_of_its_own():
    with RedisServer() as running:
        yield running
