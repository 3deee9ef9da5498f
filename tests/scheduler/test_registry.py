"""The conformance suite: what every implementation of the registry promises."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvxfer.errors import (
    InstanceExists,
    InvalidArgument,
    NoCapacity,
    StaleEpoch,
    UnknownInstance,
    UnknownTransfer,
)
from kvxfer.instances import (
    Change,
    ChangeCause,
    Instance,
    InstanceState,
    Load,
    Reserved,
    Role,
    Snapshot,
)
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.registry import Registry, TransferEnd
from kvxfer.transfers import Party, Transfer
from verify.processes.control_plane import worker

from .conftest import FEED_CAPACITY, LEASE, RegistryUnderTest

JOINING, READY = InstanceState.JOINING, InstanceState.READY
DRAINING, GONE = InstanceState.DRAINING, InstanceState.GONE


async def open_between(
    fleet: RegistryUnderTest,
    prefill_id: str,
    decode_id: str,
    *,
    transfer_id: str = "t-1",
    blocks: int = 4,
    seconds: float = 60.0,
) -> Transfer:
    now = fleet.clock.unix()
    transfer = Transfer(
        transfer_id=transfer_id,
        request_id="r-1",
        model="llama",
        prompt_tokens=blocks * 16,
        prefill=Party.of(await fleet.registry.instance(prefill_id)),
        decode=Party.of(await fleet.registry.instance(decode_id)),
        prefill_blocks=blocks,
        decode_blocks=blocks,
        created_at=now,
        expires_at=now + seconds,
    )
    await fleet.registry.reserve(transfer, seconds=seconds)
    return transfer


async def reserved(registry: Registry, instance_id: str) -> tuple[int, int]:
    held = (await registry.instance(instance_id)).reserved
    return held.transfers, held.blocks


async def take(registry: Registry, count: int, after: int | None) -> list[Snapshot | Change]:
    """Returns the first `count` items of a watch, which must exist already."""
    watch = registry.watch(after)
    return [await anext(watch) for _ in range(count)]


# --- register --------------------------------------------------------------------------------


async def test_registration_begins_a_lease_in_state_joining(fleet):
    lease = await fleet.registry.register(worker("p"))
    assert (lease.instance_id, lease.state) == ("p", JOINING)
    assert lease.lease_seconds == LEASE
    assert 0 < lease.heartbeat_interval <= LEASE / 3


async def test_registered_instance_has_the_workers_data_and_the_time(fleet):
    spec = worker("p", Role.BOTH, labels={"zone": "a"}, fabrics=("tcp",))
    lease = await fleet.registry.register(spec, state=READY)
    instance = await fleet.registry.instance("p")
    assert instance == Instance(
        **{name: getattr(spec, name) for name in spec.__struct_fields__},
        epoch=lease.epoch,
        state=READY,
        registered_at=fleet.clock.unix(),
        heartbeat_at=fleet.clock.unix(),
        load=Load(),
        reserved=Reserved(),
    )


async def test_live_id_is_refused_with_both_addresses_and_the_remaining_lease(fleet):
    lease = await fleet.join("p")
    await fleet.pass_time(2.0)
    other = worker("p", model="other", http_address="http://[fd00::2]:8000")
    with pytest.raises(InstanceExists) as refusal:
        await fleet.registry.register(other)
    assert str(refusal.value) == (
        "two instances have the instance_id 'p': one is alive at http://127.0.0.1:9 (epoch "
        f"{lease.epoch}), the other registers from http://[fd00::2]:8000; leave instance_id out, "
        "or make it unique for each replica. An instance that replaces another is accepted "
        f"when the earlier lease ends, in {LEASE - 2:.1f} s without a heartbeat"
    )
    assert refusal.value.details == {
        "instance_id": "p",
        "epoch": lease.epoch,
        "lease_remaining_seconds": pytest.approx(LEASE - 2.0, abs=0.01),
    }
    assert (await fleet.registry.instance("p")).model == "llama"


async def test_refusal_at_the_same_address_names_the_address_and_not_replicas(fleet):
    await fleet.join("p")
    with pytest.raises(InstanceExists, match="instance_id and address registers") as refusal:
        await fleet.registry.register(worker("p"), incarnation="restarted")
    assert "replica" not in str(refusal.value)
    await fleet.pass_time(LEASE)
    await fleet.registry.register(worker("p"), incarnation="restarted")


async def test_epochs_ascend_over_deregistration_expiry_and_between_ids(fleet):
    epochs = [(await fleet.join("p")).epoch]
    await fleet.registry.deregister("p", epochs[-1])
    epochs.append((await fleet.join("p")).epoch)
    await fleet.pass_time(LEASE)
    epochs.append((await fleet.join("p")).epoch)
    epochs.append((await fleet.join("q")).epoch)
    assert epochs == sorted(set(epochs))


async def test_process_that_still_holds_its_id_gets_a_new_epoch(fleet):
    first = await fleet.registry.register(worker("p"), state=READY, incarnation="one")
    second = await fleet.registry.register(worker("p"), state=READY, incarnation="one")
    assert second.epoch > first.epoch
    with pytest.raises(StaleEpoch):
        await fleet.registry.heartbeat("p", first.epoch)
    await fleet.registry.heartbeat("p", second.epoch)


@pytest.mark.parametrize(("holder", "other"), [("one", "two"), ("one", ""), ("", ""), ("", "two")])
async def test_other_incarnation_does_not_get_a_live_id(fleet, holder, other):
    await fleet.registry.register(worker("p"), incarnation=holder)
    with pytest.raises(InstanceExists):
        await fleet.registry.register(worker("p"), incarnation=other)


async def test_only_one_of_many_concurrent_registrations_wins(fleet):
    answers = await asyncio.gather(
        *(fleet.registry.register(worker("p"), incarnation=str(i)) for i in range(20)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, InstanceExists) for answer in answers) == 19


# --- heartbeat -------------------------------------------------------------------------------


async def test_heartbeats_keep_an_instance_beyond_its_first_lease(fleet):
    lease = await fleet.join("p")
    for _ in range(5):
        await fleet.pass_time(LEASE * 0.9)
        assert (await fleet.registry.heartbeat("p", lease.epoch)).epoch == lease.epoch
    assert (await fleet.registry.instance("p")).heartbeat_at == pytest.approx(
        fleet.clock.unix(), abs=0.01
    )


async def test_instance_without_heartbeat_is_gone_when_its_lease_ends(fleet):
    lease = await fleet.join("p")
    await fleet.pass_time(LEASE * 0.99)
    assert (await fleet.registry.instance("p")).state is READY
    await fleet.pass_time(LEASE * 0.01)
    with pytest.raises(UnknownInstance):
        await fleet.registry.instance("p")
    with pytest.raises(StaleEpoch, match="register again"):
        await fleet.registry.heartbeat("p", lease.epoch)
    assert await fleet.registry.instances() == ()


async def test_heartbeat_with_another_epoch_is_stale_and_renews_nothing(fleet):
    old = await fleet.join("p")
    await fleet.registry.deregister("p", old.epoch)
    new = await fleet.join("p")
    await fleet.pass_time(LEASE * 0.9)
    for epoch in (old.epoch, new.epoch + 1):
        with pytest.raises(StaleEpoch):
            await fleet.registry.heartbeat("p", epoch)
    await fleet.pass_time(LEASE * 0.1)
    with pytest.raises(UnknownInstance):
        await fleet.registry.instance("p")


async def test_heartbeat_of_an_id_never_seen_is_stale(fleet):
    with pytest.raises(StaleEpoch):
        await fleet.registry.heartbeat("nobody", 1)


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        ([None], JOINING),
        ([READY], READY),
        ([READY, JOINING], READY),
        ([READY, DRAINING], DRAINING),
        ([DRAINING, READY], DRAINING),
        ([READY, DRAINING, JOINING, None], DRAINING),
    ],
)
async def test_states_only_move_forward(fleet, wanted, held):
    lease = await fleet.join("p", state=JOINING)
    for state in wanted:
        answer = await fleet.registry.heartbeat("p", lease.epoch, state=state)
    assert answer.state is held
    assert (await fleet.registry.instance("p")).state is held


async def test_load_is_replaced_as_a_whole_and_kept_if_a_heartbeat_has_none(fleet):
    lease = await fleet.join("p")
    await fleet.registry.heartbeat("p", lease.epoch, load=Load(running=3, free_blocks=7))
    await fleet.registry.heartbeat("p", lease.epoch)
    assert (await fleet.registry.instance("p")).load == Load(running=3, free_blocks=7)
    await fleet.registry.heartbeat("p", lease.epoch, load=Load(waiting=1))
    assert (await fleet.registry.instance("p")).load == Load(waiting=1)


# --- deregister, list ------------------------------------------------------------------------


async def test_deregistered_instance_is_gone_and_its_id_free(fleet):
    lease = await fleet.join("p")
    await fleet.registry.deregister("p", lease.epoch)
    with pytest.raises(UnknownInstance):
        await fleet.registry.instance("p")
    with pytest.raises(UnknownInstance):
        await fleet.registry.deregister("p", lease.epoch)
    await fleet.join("p")


async def test_old_epoch_cannot_deregister_its_successor(fleet):
    old = await fleet.join("p")
    await fleet.registry.deregister("p", old.epoch)
    await fleet.join("p")
    with pytest.raises(StaleEpoch):
        await fleet.registry.deregister("p", old.epoch)
    assert (await fleet.registry.instance("p")).state is READY


async def test_instances_are_listed_by_id(fleet):
    for name in ("p-2", "d-1", "p-1"):
        await fleet.join(name)
    assert [i.instance_id for i in await fleet.registry.instances()] == ["d-1", "p-1", "p-2"]


# --- watch -----------------------------------------------------------------------------------


async def test_watch_begins_with_the_whole_fleet(fleet):
    await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    (snapshot,) = await take(fleet.registry, 1, after=None)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.instances == await fleet.registry.instances()


async def test_watch_reports_each_step_of_a_life_in_order(fleet):
    (start,) = await take(fleet.registry, 1, after=None)
    lease = await fleet.join("p", state=JOINING)
    await fleet.registry.heartbeat("p", lease.epoch, state=READY)
    await fleet.registry.heartbeat("p", lease.epoch, state=DRAINING)
    await fleet.registry.deregister("p", lease.epoch)
    await fleet.join("q")
    await fleet.pass_time(LEASE)
    await fleet.registry.sweep()

    changes = await take(fleet.registry, 6, after=start.id)
    assert [(c.instance.instance_id, c.cause, c.instance.state) for c in changes] == [
        ("p", ChangeCause.REGISTERED, JOINING),
        ("p", ChangeCause.STATE_CHANGED, READY),
        ("p", ChangeCause.STATE_CHANGED, DRAINING),
        ("p", ChangeCause.DEREGISTERED, GONE),
        ("q", ChangeCause.REGISTERED, READY),
        ("q", ChangeCause.LEASE_EXPIRED, GONE),
    ]
    ids = [start.id, *(change.id for change in changes)]
    assert ids == sorted(set(ids))


async def test_heartbeat_that_only_reports_load_is_no_change(fleet):
    lease = await fleet.join("p")
    (start,) = await take(fleet.registry, 1, after=None)
    await fleet.registry.heartbeat("p", lease.epoch, state=READY, load=Load(running=9))
    await fleet.registry.deregister("p", lease.epoch)
    (change,) = await take(fleet.registry, 1, after=start.id)
    assert change.cause is ChangeCause.DEREGISTERED


async def test_watch_resumes_after_any_change_that_is_still_kept(fleet):
    (start,) = await take(fleet.registry, 1, after=None)
    for i in range(FEED_CAPACITY):
        await fleet.join(f"p-{i}")
    changes = await take(fleet.registry, FEED_CAPACITY, after=start.id)
    for seen in range(FEED_CAPACITY):
        rest = await take(fleet.registry, FEED_CAPACITY - seen - 1, after=changes[seen].id)
        assert rest == changes[seen + 1 :]


@pytest.mark.parametrize("where", ["too old", "of another registry", "in the future"])
async def test_watch_that_cannot_resume_begins_with_a_snapshot(fleet, where):
    (start,) = await take(fleet.registry, 1, after=None)
    for i in range(FEED_CAPACITY + 1):
        await fleet.join(f"p-{i}")
    (now,) = await take(fleet.registry, 1, after=None)
    after = {"too old": start.id, "of another registry": 3, "in the future": now.id + 1}[where]
    assert await take(fleet.registry, 1, after=after) == [now]


async def test_reader_that_falls_behind_gets_the_whole_fleet_again(fleet):
    watch = fleet.registry.watch()
    await anext(watch)
    for i in range(FEED_CAPACITY * 3):
        await fleet.join(f"p-{i:02}")
    caught_up = await anext(watch)
    assert isinstance(caught_up, Snapshot)
    assert caught_up.instances == await fleet.registry.instances()


async def test_every_waiting_watch_hears_of_a_change(fleet):
    watches = [fleet.registry.watch() for _ in range(3)]
    for watch in watches:
        await anext(watch)
    waiting = [asyncio.ensure_future(anext(watch)) for watch in watches]
    await fleet.join("p")
    changes = await asyncio.gather(*waiting)
    assert [change.instance.instance_id for change in changes] == ["p"] * 3


async def test_close_ends_watches(fleet):
    watch = fleet.registry.watch()
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch, None))
    await fleet.registry.close()
    assert await waiting is None


# --- transfers -------------------------------------------------------------------------------


async def test_reservation_counts_on_both_sides_until_released(fleet):
    await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    transfer = await open_between(fleet, "p", "d", blocks=4)
    assert await fleet.registry.transfer("t-1") == transfer
    assert await reserved(fleet.registry, "p") == (1, 4)
    assert await reserved(fleet.registry, "d") == (1, 4)
    await fleet.registry.release("t-1")
    assert await reserved(fleet.registry, "p") == (0, 0)
    assert await reserved(fleet.registry, "d") == (0, 0)
    with pytest.raises(UnknownTransfer):
        await fleet.registry.transfer("t-1")
    with pytest.raises(UnknownTransfer):
        await fleet.registry.release("t-1")


async def test_reservation_of_one_instance_counts_once_and_starts_there(fleet):
    await fleet.join("b", Role.BOTH)
    await open_between(fleet, "b", "b", blocks=4)
    assert await reserved(fleet.registry, "b") == (1, 4)
    await fleet.registry.release("t-1")
    assert await reserved(fleet.registry, "b") == (0, 0)
    assert (await fleet.registry.instance("b")).started == 1


async def test_reservation_ends_by_itself_when_its_time_is_over(fleet):
    leases = {"p": await fleet.join("p"), "d": await fleet.join("d", Role.DECODE)}
    await open_between(fleet, "p", "d", seconds=LEASE * 1.5)
    await fleet.pass_time(LEASE * 0.8)
    for name, lease in leases.items():
        await fleet.registry.heartbeat(name, lease.epoch)
    await fleet.pass_time(LEASE * 0.6)
    assert await reserved(fleet.registry, "p") == (1, 4)
    await fleet.pass_time(LEASE * 0.1)
    assert await reserved(fleet.registry, "p") == (0, 0)
    assert await reserved(fleet.registry, "d") == (0, 0)
    with pytest.raises(UnknownTransfer):
        await fleet.registry.transfer("t-1")


@pytest.mark.parametrize("end", ["deregistered", "lease expired", "replaced by a new epoch"])
async def test_reservation_ends_with_either_instance(fleet, end):
    spec = worker("p")
    prefill = await fleet.registry.register(spec, state=READY, incarnation="one")
    decode = await fleet.join("d", Role.DECODE)
    await open_between(fleet, "p", "d")
    match end:
        case "deregistered":
            await fleet.registry.deregister("p", prefill.epoch)
        case "lease expired":
            await fleet.pass_time(LEASE * 0.5)
            await fleet.registry.heartbeat("d", decode.epoch)
            await fleet.pass_time(LEASE * 0.5)
        case _:
            await fleet.registry.register(spec, state=READY, incarnation="one")
            assert await reserved(fleet.registry, "p") == (0, 0)
    assert await reserved(fleet.registry, "d") == (0, 0)
    with pytest.raises(UnknownTransfer):
        await fleet.registry.transfer("t-1")


@pytest.mark.parametrize("state", [JOINING, DRAINING])
@pytest.mark.parametrize("side", ["p", "d"])
async def test_instance_that_is_not_ready_takes_no_reservation(fleet, state, side):
    leases = {
        "p": await fleet.join("p", state=JOINING),
        "d": await fleet.join("d", Role.DECODE, state=JOINING),
    }
    for name, lease in leases.items():
        await fleet.registry.heartbeat(name, lease.epoch, state=state if name == side else READY)
    with pytest.raises(NoCapacity, match=f"'{side}' is {state}"):
        await open_between(fleet, "p", "d")
    assert await reserved(fleet.registry, "p") == (0, 0)
    assert await reserved(fleet.registry, "d") == (0, 0)


async def test_draining_instance_keeps_the_transfers_it_has(fleet):
    lease = await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    await open_between(fleet, "p", "d")
    await fleet.registry.heartbeat("p", lease.epoch, state=DRAINING)
    assert await reserved(fleet.registry, "p") == (1, 4)
    await fleet.registry.release("t-1")


async def test_pair_of_an_earlier_epoch_cannot_be_reserved(fleet):
    old = await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    pair = [Party.of(await fleet.registry.instance(name)) for name in ("p", "d")]
    await fleet.registry.deregister("p", old.epoch)
    await fleet.join("p")
    transfer = Transfer(
        transfer_id="t-1",
        request_id="r-1",
        model="llama",
        prompt_tokens=None,
        prefill=pair[0],
        decode=pair[1],
        prefill_blocks=0,
        decode_blocks=0,
        created_at=0.0,
        expires_at=60.0,
    )
    with pytest.raises(StaleEpoch):
        await fleet.registry.reserve(transfer, seconds=60)
    assert await reserved(fleet.registry, "p") == (0, 0)
    assert await reserved(fleet.registry, "d") == (0, 0)


async def test_blocks_are_never_promised_twice(fleet):
    await fleet.join("p", num_blocks=1000)
    await fleet.join("d", Role.DECODE, num_blocks=10)
    answers = await asyncio.gather(
        *(open_between(fleet, "p", "d", transfer_id=f"t-{i}", blocks=4) for i in range(5)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, NoCapacity) for answer in answers) == 3
    assert await reserved(fleet.registry, "d") == (2, 8)
    assert await reserved(fleet.registry, "p") == (2, 8), "a refused one counts on neither side"


# --- statistics ------------------------------------------------------------------------------


async def test_statistics_count_instances_transfers_and_how_they_ended(fleet):
    prefill = await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    await fleet.join("j", Role.DECODE, state=JOINING)
    for number in range(3):
        await open_between(fleet, "p", "d", transfer_id=f"t-{number}", seconds=LEASE / 2)
    await fleet.registry.release("t-0")

    now = await fleet.registry.statistics()
    assert dict(now.instances) == {
        (Role.PREFILL, READY): 1,
        (Role.DECODE, READY): 1,
        (Role.DECODE, JOINING): 1,
    }
    assert (now.registrations, now.transfers_opened, now.open_transfers) == (3, 3, 2)

    await fleet.pass_time(LEASE / 2)
    await open_between(fleet, "p", "d", transfer_id="t-3")
    await fleet.registry.heartbeat("p", prefill.epoch)
    await fleet.pass_time(LEASE / 2)

    later = await fleet.registry.statistics()
    assert (later.leases_expired, later.open_transfers) == (2, 0)
    assert dict(later.transfers_ended) == {
        TransferEnd.RELEASED: 1,
        TransferEnd.EXPIRED: 2,
        TransferEnd.INSTANCE_GONE: 1,
    }


def test_lease_must_be_longer_than_0():
    with pytest.raises(InvalidArgument, match="lease_seconds is 0"):
        LeasePolicy(0)


# --- everything at once ----------------------------------------------------------------------


async def test_reservations_and_watch_agree_with_the_fleet_after_any_history(fleet, seed):
    """Random histories: reservations equal the open transfers; the watch equals the fleet."""
    source = random.Random(seed)
    epochs: dict[str, int] = {}
    opened: list[str] = []
    known: dict[str, Instance] = {}
    seen: int | None = None

    async def read_watch() -> None:
        nonlocal seen
        watch = fleet.registry.watch(seen)
        marker = (await fleet.join(f"marker-{source.random()}", state=JOINING)).epoch
        while seen is None or seen < marker:
            item = await anext(watch)
            seen = item.id
            if isinstance(item, Snapshot):
                known.clear()
                known.update({i.instance_id: i for i in item.instances})
            elif item.instance.state is GONE:
                del known[item.instance.instance_id]
            else:
                known[item.instance.instance_id] = item.instance

    for step in range(400):
        name = f"w-{source.randrange(6)}"
        try:
            match source.choice(
                ["join", "beat", "beat", "state", "leave", "open", "open", "release", "time"]
            ):
                case "join":
                    epochs[name] = (await fleet.join(name, Role.BOTH)).epoch
                case "beat":
                    await fleet.registry.heartbeat(name, epochs.get(name, 1))
                case "state":
                    state = source.choice([READY, DRAINING])
                    await fleet.registry.heartbeat(name, epochs.get(name, 1), state=state)
                case "leave":
                    await fleet.registry.deregister(name, epochs.get(name, 1))
                case "open":
                    await open_between(
                        fleet,
                        name,
                        f"w-{source.randrange(6)}",  # sometimes the same instance
                        transfer_id=f"t-{step}",
                        blocks=source.randrange(20),
                        seconds=source.uniform(0.5, 10),
                    )
                    opened.append(f"t-{step}")
                case "release" if opened:
                    await fleet.registry.release(source.choice(opened))
                case _:
                    await fleet.pass_time(source.uniform(0, 2))
        except (InstanceExists, UnknownInstance, UnknownTransfer, StaleEpoch, NoCapacity):
            pass

        expected: dict[str, list[int]] = {}
        for transfer_id in opened:
            try:
                transfer = await fleet.registry.transfer(transfer_id)
            except UnknownTransfer:
                continue
            for name in {transfer.prefill.instance_id, transfer.decode.instance_id}:
                expected.setdefault(name, []).append(transfer.blocks_on(name))
        for instance in await fleet.registry.instances():
            blocks = expected.get(instance.instance_id, [])
            assert instance.reserved == Reserved(transfers=len(blocks), blocks=sum(blocks))
            assert instance.reserved.blocks <= instance.num_blocks
        if step % 10 == 0:
            await read_watch()
            assert {(i.instance_id, i.epoch, i.state) for i in known.values()} == {
                (i.instance_id, i.epoch, i.state) for i in await fleet.registry.instances()
            }
