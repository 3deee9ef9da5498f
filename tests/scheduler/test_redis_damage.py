"""Values in Redis that the registry did not write: each is named, and no replica accepts it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from redis import Redis

from kvxfer.clock import SystemClock
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import BlockUpdate, InstanceState, Role
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.redis_registry.records import decode_instance
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest
from kvxfer.weight_updates import AnnounceUpdate
from verify.polling import eventually
from verify.processes.block_tables import block_table
from verify.processes.control_plane import worker
from verify.processes.redis_server import RedisServer

from .redis_replica import is_current, replica

pytestmark = pytest.mark.native

READY = InstanceState.READY


async def filled(registry: RedisRegistry) -> str:
    """Registers a pair, opens a transfer with a table, and returns the id of the transfer."""
    lease = await registry.register(worker("p"), state=READY)
    await registry.register(worker("d", Role.DECODE), state=READY)
    await registry.publish_blocks("p", lease.epoch, BlockUpdate(added=(1, 2)))
    opened = await open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock())
    await registry.put_block_table(opened.transfer_id, block_table())
    update = AnnounceUpdate(update_id="u", model="llama", version=1)
    await registry.announce_update(update, seconds=60)
    return opened.transfer_id


def member(client: Redis, **changed: object) -> bytes:
    held = msgspec.msgpack.decode(client.hget("kvxfer:instances", "p"))
    return msgspec.msgpack.encode({**held, **changed})


def spec(**changed: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(worker("p")), **changed})


DAMAGE: dict[str, tuple[Callable[[Redis, str], object], str]] = {
    "member": (lambda c, t: c.hset("kvxfer:instances", "p", b"\xc1"), "instance 'p'"),
    "epoch": (
        lambda c, t: c.hset("kvxfer:instances", "p", member(c, epoch="new")),
        r"instance 'p'.*epoch",
    ),
    "time": (
        lambda c, t: c.hset("kvxfer:instances", "p", member(c, heartbeat_at=float("nan"))),
        "instance 'p'.*a number is nan",
    ),
    "load": (
        lambda c, t: c.hset("kvxfer:instances", "p", member(c, load={"ttft_p90": float("inf")})),
        r"instance 'p'.*at `\$.load.ttft_p90`",
    ),
    "no spec": (lambda c, t: c.hdel("kvxfer:specs", "p"), "instance 'p'"),
    "spec": (lambda c, t: c.hset("kvxfer:specs", "p", b"{"), "instance 'p'"),
    "spec of another": (
        lambda c, t: c.hset("kvxfer:specs", "p", spec(instance_id="q")),
        "instance 'p'.*it is that of 'q'",
    ),
    "no blocks": (
        lambda c, t: c.hset("kvxfer:specs", "p", spec(num_blocks=0)),
        r"instance 'p'.*at `\$.num_blocks`",
    ),
    "transfer": (
        lambda c, t: c.hset("kvxfer:transfers", t, b"\x80"),
        "transfer '.*prompt|transfer",
    ),
    "transfer of another id": (
        lambda c, t: c.hset("kvxfer:transfers", "other", c.hget("kvxfer:transfers", t)),
        "transfer 'other'",
    ),
    "name": (lambda c, t: c.hset("kvxfer:tables", b"\xff", b""), "place in the log"),
    "change": (
        lambda c, t: c.xadd("kvxfer:changes", {"cause": "boredom"}),
        r"change '\d+-\d'",
    ),
    "weight update": (
        lambda c, t: c.hset("kvxfer:updates", "u", b"\xc1"),
        "weight update 'u'",
    ),
    "weight update of another id": (
        lambda c, t: c.hset("kvxfer:updates", "v", c.hget("kvxfer:updates", "u")),
        "weight update 'v'.*it is 'u'",
    ),
    "no change": (
        lambda c, t: c.delete("kvxfer:changes", "kvxfer:changed"),
        "place in the log",
    ),
    "sequence": (
        lambda c, t: c.set("kvxfer:sequence", "many"),
        "got nil.*delete what kvxfer keeps",
    ),
    "kind of key": (
        lambda c, t: c.delete("kvxfer:transfers") and c.set("kvxfer:transfers", "x"),
        "WRONGTYPE.*delete what kvxfer keeps",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
async def test_damaged_values_are_named_and_no_replica_accepts_them(
    empty_redis: RedisServer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    damage, said = DAMAGE[name]
    async with replica(empty_redis) as registry:
        transfer_id = await filled(registry)
    with empty_redis.client() as client:
        damage(client, transfer_id)
    async with replica(empty_redis, timeout=5, there=False) as registry:

        async def words() -> str:
            with pytest.raises(ControlPlaneUnavailable) as refused:
                await registry.instances()
            text = str(refused.value)
            return "" if "not connected yet" in text else text

        await eventually(words)
        with pytest.raises(ControlPlaneUnavailable, match=said):
            await registry.ping()
        with empty_redis.client() as client:
            client.flushall()
        await eventually(lambda: is_current(registry))
        await filled(registry)
    assert [record for record in caplog.records if record.exc_info] == []


async def test_damaged_hashes_of_an_instance_are_named_and_left_out(
    empty_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(empty_redis) as registry:
        await filled(registry)
        lease = await registry.register(worker("q"), state=READY)
        await registry.publish_blocks("q", lease.epoch, BlockUpdate(added=(3,)))
    with empty_redis.client() as client:
        client.hset("kvxfer:blocks", "p:0", b"odd")
    async with replica(empty_redis) as registry:
        await eventually(lambda: "what instance 'p' has cached in Redis is damaged" in caplog.text)
        pair = await registry.choose(TransferRequest(prefix_hashes=(3,), prompt_tokens=64))
        assert pair.prefill.instance_id == "q"
        assert registry.stale_seconds is None


RECORDS: dict[str, dict[str, str]] = {
    "nothing": {},
    "no number": {"after": "x"},
    "change": {"kind": "change", "cause": "registered", "instance": "p", "member": "", "spec": ""},
    "beat": {"kind": "beat", "instance": "p", "heartbeat_at": "nan", "load": ""},
    "load": {"kind": "beat", "instance": "p", "heartbeat_at": "1", "load": "x"},
    "blocks": {"kind": "blocks", "instance": "q", "come": "", "go": "", "anew": ""},
    "hashes": {"kind": "blocks", "instance": "p", "come": "odd", "go": "", "anew": "1"},
    "update": {"kind": "update", "update": "x"},
    "open": {"kind": "open", "transfer": "x"},
    "end": {"kind": "end", "transfer": "unknown"},
}


@pytest.mark.parametrize("name", RECORDS)
async def test_a_damaged_record_of_the_log_is_named_and_everything_is_loaded_again(
    empty_redis: RedisServer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.WARNING)
    async with replica(empty_redis) as registry:
        transfer_id = await filled(registry)
        with empty_redis.client() as client:
            last = int(client.get("kvxfer:sequence"))
            fields = {"after": str(last), **RECORDS[name]}
            moment = client.pipeline()
            moment.xadd("kvxfer:log", fields, id=f"{last + 1}-0")
            moment.set("kvxfer:sequence", last + 1)
            moment.execute()
        await eventually(lambda: f"record {last + 1}-0 of the log" in caplog.text)
        await eventually(lambda: is_current(registry))
        assert [i.instance_id for i in await registry.instances()] == ["d", "p"]
        assert (await registry.transfer(transfer_id)).transfer_id == transfer_id
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_damaged_value_fails_only_the_step_that_reads_it(
    empty_redis: RedisServer,
) -> None:
    async with replica(empty_redis) as registry:
        transfer_id = await filled(registry)
        living = await registry.instance("d")
        with empty_redis.client() as client:
            client.hset("kvxfer:instances", "p", b"\xc1")
            client.hset("kvxfer:tables", transfer_id, b"\xc1")
            client.hset("kvxfer:counts", "registrations", "many")
        refused: list[tuple[Callable[[], Awaitable[object]], str]] = [
            (lambda: registry.heartbeat("p", 1), "did not take this step"),
            (lambda: registry.drain("p", seconds=1), "did not take this step"),
            (lambda: registry.block_table(transfer_id), f"table of transfer '{transfer_id}'"),
            (registry.statistics, "since the registry began"),
        ]
        for call, said in refused:
            with pytest.raises(ControlPlaneUnavailable, match=said):
                await call()
        assert registry.stale_seconds is None
        assert (await registry.heartbeat("d", living.epoch)).epoch == living.epoch


def test_a_spec_of_an_earlier_control_plane_has_the_first_kv_versions() -> None:
    told = msgspec.to_builtins(worker("p"))
    del told["kv_versions"]
    held = {"epoch": 1, "state": "ready", "role": "prefill", "reserved": {}}
    member = msgspec.msgpack.encode({**held, "registered_at": 0.0, "heartbeat_at": 0.0})
    instance = decode_instance(b"p", member, msgspec.json.encode(told))
    assert instance.kv_versions == (7, 7)
