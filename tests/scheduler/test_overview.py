"""The overview of a fleet: what it counts, what it leaves out, and that it stays small."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvxfer.instances import Instance, InstanceState, Load, Reserved, Role, Traffic
from kvxfer.overview import Level, Overview, OverviewQuery
from kvxfer.scheduler.overview import MAX_PAIRS, MAX_PLACES, MAX_TRANSFERS, MAX_UPDATES, look
from kvxfer.transfers import Party, Transfer
from kvxfer.weight_updates import (
    PartState,
    UpdateError,
    UpdatePart,
    UpdatePolicy,
    UpdateState,
    WeightUpdate,
)
from verify.processes.control_plane import worker

NOW = 1_800_000_000.0


def instance(instance_id: str, role: str = "prefill", where: str = "", **changes: Any) -> Instance:
    """Returns a live instance at `where`: zone/rack/host."""
    labels = dict(zip(("zone", "rack", "host"), where.split("/"), strict=False)) if where else {}
    spec = worker(instance_id, role, labels=labels, model=changes.pop("model", "llama"))
    known = {name: getattr(spec, name) for name in spec.__struct_fields__}
    changes = {"state": InstanceState.READY, "heartbeat_at": NOW - 1, **changes}
    return Instance(**known, epoch=1, registered_at=NOW - 60, **changes)


def sends(to: str, rate: float, fabric: str = "tcp") -> Load:
    return Load(sent=(Traffic(to=to, fabric=fabric, bytes_per_second=rate),))


def transfer(number: int, prefill: Instance, decode: Instance) -> Transfer:
    return Transfer(
        transfer_id=f"t{number}",
        request_id=f"r{number}",
        model="llama",
        prompt_tokens=100,
        prefill=Party.of(prefill),
        decode=Party.of(decode),
        prefill_blocks=7,
        decode_blocks=8,
        created_at=NOW - 1000 + number,
        expires_at=NOW + 60,
    )


async def seen(*instances: Instance, transfers: Any = (), **query: Any) -> Overview:
    ordered = sorted(instances, key=lambda each: each.instance_id)
    sent = {each.instance_id: each.load.sent for each in instances}
    return await look(ordered, transfers, OverviewQuery(**query), now=NOW, sent=sent)


async def test_roles_are_summed_and_what_is_not_measured_is_left_out():
    overview = await seen(
        instance("p", load=Load(running=2, waiting=1, free_blocks=16, ttft_p90=0.5)),
        instance("q", load=Load(running=1, requests_per_second=3.5, ttft_p90=0.2)),
        instance("d", "decode", state=InstanceState.DRAINING, load=Load(free_blocks=64)),
    )
    prefill, decode, both = overview.roles
    assert (prefill.role, prefill.ready, prefill.running, prefill.waiting) == ("prefill", 2, 3, 1)
    assert (prefill.used_blocks, prefill.blocks) == (48, 64)
    assert (prefill.requests_per_second, prefill.ttft_p90, prefill.itl_p90) == (3.5, 0.5, None)
    assert (decode.ready, decode.draining, decode.used_blocks, decode.blocks) == (0, 1, 0, 64)
    assert (both.role, both.ready) == (Role.BOTH, 0)
    assert (overview.total, overview.matching, overview.at) == (3, 3, NOW)


async def test_a_row_says_what_is_known_of_an_instance():
    p = instance(
        "p",
        where="z/r/h",
        state=InstanceState.DRAINING,
        load=msgspec.structs.replace(sends("d", 5.0), running=3, free_blocks=60),
        reserved=Reserved(transfers=2, blocks=9),
        drain_deadline=NOW + 30,
    )
    d, row = (await seen(p, instance("d", "decode"))).instances
    assert (row.instance_id, row.zone, row.rack, row.host) == ("p", "z", "r", "h")
    assert (row.running, row.transfers, row.used_blocks, row.blocks) == (3, 2, 4, 64)
    assert (row.heartbeat_seconds, row.drain_seconds) == (1, 30)
    assert (row.sent_bytes_per_second, row.received_bytes_per_second) == (5, 0)
    assert (d.sent_bytes_per_second, d.received_bytes_per_second, d.used_blocks) == (0, 5, None)
    assert (d.zone, d.drain_seconds) == ("", None)


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, ["d", "p-1", "p-2"]),
        ({"role": Role.PREFILL}, ["p-1", "p-2"]),
        ({"state": InstanceState.JOINING}, ["p-2"]),
        ({"model": "qwen"}, ["d"]),
        ({"zone": "a"}, ["p-1", "p-2"]),
        ({"zone": "a", "rack": "y"}, ["p-2"]),
        ({"zone": ""}, ["d"]),
        ({"host": "h"}, ["p-1"]),
        ({"search": "P-"}, ["p-1", "p-2"]),
        ({"instance_id": "p-1"}, ["p-1"]),
        ({"limit": 1, "offset": 1}, ["p-1"]),
        ({"limit": 0}, []),
        ({"model": "none"}, []),
    ],
)
async def test_instances_are_selected_by_the_query(query, ids):
    overview = await seen(
        instance("p-1", where="a/x/h"),
        instance("p-2", where="a/y/i", state=InstanceState.JOINING),
        instance("d", "decode", model="qwen"),
        **query,
    )
    assert [row.instance_id for row in overview.instances] == ids
    assert overview.total == 3
    assert overview.models == ("llama", "qwen")
    assert sum(place.prefill + place.decode for place in overview.places) == overview.matching
    if "limit" not in query:
        assert overview.matching == len(ids)


async def test_traffic_and_transfers_are_those_of_the_instances_asked_for():
    p, q = instance("p", load=sends("d", 7)), instance("q", load=sends("e", 4, "verbs"))
    d, e = instance("d", "decode", where="z"), instance("e", "decode")
    opened = [transfer(1, p, d), transfer(2, q, e)]
    all_of_it = await seen(p, q, d, e, transfers=opened)
    assert [(f.fabric, f.bytes_per_second) for f in all_of_it.fabrics] == [("tcp", 7), ("verbs", 4)]
    assert [(x.prefill, x.decode, x.fabric) for x in all_of_it.pairs] == [
        ("p", "d", "tcp"),
        ("q", "e", "verbs"),
    ]
    assert [t.transfer_id for t in all_of_it.transfers] == ["t2", "t1"]
    assert all_of_it.transfers[0].age_seconds == 998
    some = await seen(p, q, d, e, transfers=opened, zone="z")
    assert [(x.prefill, x.decode) for x in some.pairs] == [("p", "d")]
    assert (some.transfers_open, [t.transfer_id for t in some.transfers]) == (1, ["t1"])
    (place,) = some.places
    assert (place.name, place.bytes_per_second) == ("d", 7)


@pytest.mark.parametrize(
    ("instances", "hosts", "racks", "zones", "level", "places"),
    [
        (MAX_PLACES, 7, 3, 2, Level.INSTANCE, MAX_PLACES),
        (MAX_PLACES + 1, 8, 4, 2, Level.HOST, 8),
        (2000, 1000, 100, 4, Level.RACK, 100),
        (2000, 2000, 1000, 5, Level.ZONE, 5),
        (2000, 2000, 2000, 1000, Level.ZONE, MAX_PLACES),
    ],
)
async def test_the_map_has_the_narrowest_level_with_few_enough_places(
    instances, hosts, racks, zones, level, places
):
    overview = await seen(
        *(
            instance(f"i{n}", where=f"z{n % zones}/r{n % racks}/h{n % hosts}", load=Load(running=1))
            for n in range(instances)
        )
    )
    assert (overview.level, len(overview.places)) == (level, places)
    shown = sum(place.prefill for place in overview.places)
    if overview.places_omitted:
        assert (overview.places_omitted, places) == (zones - MAX_PLACES, MAX_PLACES)
    else:
        assert shown == sum(place.running for place in overview.places) == instances
    first = overview.places[0]
    within = {Level.ZONE: 0, Level.RACK: 1}.get(level, 2)
    assert [first.rack is not None, first.host is not None] == [within >= 1, within >= 2]


async def test_the_overview_of_a_large_fleet_is_small():
    fleet = [
        instance(
            f"i{n:05}",
            where=f"z{n % 3}/r{n % 50}/h{n % 1000}",
            model=f"m{n % 100}",
            load=Load(sent=tuple(sends(f"i{m:05}", m).sent[0] for m in (n + 1, n + 2))),
        )
        for n in range(10_000)
    ]
    opened = [transfer(n, fleet[n], fleet[n + 1]) for n in range(1000)]
    overview = await look(
        fleet,
        opened,
        OverviewQuery(limit=200),
        now=NOW,
        sent={each.instance_id: each.load.sent for each in fleet},
    )
    assert (overview.matching, overview.level, len(overview.places)) == (10_000, Level.RACK, 150)
    assert (len(overview.pairs), overview.pairs_omitted) == (MAX_PAIRS, 20_000 - MAX_PAIRS)
    assert overview.pairs[0].bytes_per_second == 10_001
    assert (len(overview.transfers), overview.transfers_open) == (MAX_TRANSFERS, 1000)
    assert overview.transfers[0].transfer_id == "t999"
    assert len(msgspec.json.encode(overview)) < 200_000


async def test_updates_are_summed_up_by_the_states_of_their_instances():
    def part(name: str, state: str, pause: float | None = None) -> UpdatePart:
        return UpdatePart(instance_id=name, epoch=1, state=PartState(state), pause_seconds=pause)

    parts = (
        part("a", "receiving"),
        part("b", "staged"),
        part("c", "committed", 0.2),
        part("d", "committed", 0.3),
        part("e", "failed"),
        part("f", "lost"),
    )
    update = WeightUpdate(
        update_id="u",
        model="llama",
        version=7,
        policy=UpdatePolicy.DRAIN,
        state=UpdateState.COMMITTING,
        error=UpdateError(code="peer-lost", message="f"),
        started_at=NOW - 9,
        lease_seconds=15,
        instances=parts,
    )
    many = [replace(update, update_id=f"u{number}") for number in range(MAX_UPDATES + 1)]
    overview = await look((), (), OverviewQuery(), now=NOW, sent={}, updates=many)
    assert [u.update_id for u in overview.updates] == [f"u{n}" for n in range(MAX_UPDATES)]
    told = overview.updates[0]
    assert (told.instances, told.staged, told.committed, told.failed) == (6, 3, 2, 2)
    assert (told.age_seconds, told.pause_seconds, told.error) == (9, 0.3, "peer-lost: f")
