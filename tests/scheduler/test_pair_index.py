"""Near pairs, common fabrics, and an index that is kept up to date instead of rebuilt."""

from __future__ import annotations

import random
from itertools import product

import pytest
from msgspec.structs import replace

from kvxfer.errors import NoCapacity
from kvxfer.instances import Instance, InstanceState, Load, Reserved
from kvxfer.scheduler.pair_index import PairIndex, choose_pair
from kvxfer.scheduler.topology import LABELS, distance, place_of
from kvxfer.transfers import TransferRequest

from .test_pairing import chosen, instance


def at(instance_id: str, role: str, place: str, *, running: int = 0, **spec: object) -> Instance:
    """Returns an instance at zone/rack/host/numa, given from the left as far as it is known."""
    labels = dict(zip(LABELS, place.split("/"), strict=False)) if place else {}
    return instance(instance_id, role, labels=labels, load=Load(running=running), **spec)


P = at("p", "prefill", "a/r1/h1/0")


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        # the nearest of equally loaded pairs
        ([P, at("c", "decode", "a/r1/h2/0"), at("d", "decode", "a/r1/h1/0")], ("p", "d")),
        ([P, at("c", "decode", "a/r1/h2/0"), at("d", "decode", "a/r1/h1/1")], ("p", "d")),
        ([P, at("c", "decode", "a/r2/h2/0"), at("d", "decode", "a/r1/h2/0")], ("p", "d")),
        ([P, at("c", "decode", "b/r1/h1/0"), at("d", "decode", "a/r2/h2/0")], ("p", "d")),
        # a step nearer is worth a request more; the id decides between equals
        (
            [P, at("c", "decode", "a/r1/h1/0", running=2), at("d", "decode", "a/r1/h2/0")],
            ("p", "c"),
        ),
        (
            [P, at("c", "decode", "a/r1/h1/0", running=3), at("d", "decode", "a/r1/h2/0")],
            ("p", "d"),
        ),
        (
            [P, at("c", "decode", "b/r1/h1/0"), at("d", "decode", "a/r1/h1/0", running=3)],
            ("p", "d"),
        ),
        # the nearest decode instance of a prefill instance that is not the first
        (
            [P, at("q", "prefill", "b/r1/h1"), at("d", "decode", "b/r1/h1")],
            ("q", "d"),
        ),
        # a near one that cannot take the request does not count
        (
            [
                P,
                at("c", "decode", "a/r1/h1/0", state="draining"),
                at("d", "decode", "a/r1/h2/0"),
            ],
            ("p", "d"),
        ),
        ([P, at("c", "decode", "a/r1/h1/0", model="qwen"), at("d", "decode", "b")], ("p", "d")),
        # `both` never with itself, however near
        ([at("x", "both", "a/r1/h1"), at("y", "both", "b/r1/h1", running=1)], ("x", "y")),
        # without labels all are near
        (
            [at("p", "prefill", ""), at("c", "decode", "", running=1), at("d", "decode", "")],
            ("p", "d"),
        ),
        # the fabric that prefill prefers; local depends on the place
        (
            [
                at("p", "prefill", "", fabrics=("local", "verbs", "tcp")),
                at("c", "decode", "", fabrics=("local", "tcp")),
                at("d", "decode", "", fabrics=("verbs", "tcp")),
            ],
            ("p", "d"),
        ),
        (
            [
                at("p", "prefill", "", fabrics=("verbs", "tcp")),
                at("c", "decode", "", fabrics=("tcp",)),
                at("d", "decode", "", fabrics=("verbs",), running=2),
            ],
            ("p", "c"),
        ),
    ],
)
def test_near_pairs_with_good_fabrics_come_first(fleet, expected):
    assert chosen(fleet) == expected
    assert chosen(fleet[::-1]) == expected, "the order of the fleet decides nothing"


def cost(prefill: Instance, decode: Instance) -> int:
    requests = sum(
        i.load.running + i.load.waiting + i.reserved.transfers for i in (prefill, decode)
    )
    return requests + distance(place_of(prefill.labels), place_of(decode.labels))


def test_updated_index_finds_what_the_slow_way_finds(seed):
    source = random.Random(seed)
    levels = source.sample(LABELS, source.randrange(len(LABELS) + 1))
    fleet: dict[str, Instance] = {}
    index = PairIndex()
    served = 0
    for step in range(1500):
        name = f"i{source.randrange(14)}"
        known = fleet.get(name)
        match source.choice(["join", "load", "load", "reserve", "state", "leave"]):
            case "join":
                joined = instance(
                    name,
                    source.choice(["prefill", "decode", "both"]),
                    labels={level: source.choice("xy") for level in levels},
                    block_size=source.choice([16, 32]),
                    dtype=source.choice(["float32", "int8"]),
                )
                fleet[name] = replace(joined, epoch=step + 1)
            case "leave" if known:
                index.remove(name)
                del fleet[name]
            case "load" if known:
                load = Load(running=source.randrange(6), free_blocks=source.choice([None, 3, 64]))
                fleet[name] = replace(known, load=load)
            case "reserve" if known:
                reserved = Reserved(transfers=source.randrange(4), blocks=source.randrange(64))
                fleet[name] = replace(known, reserved=reserved)
            case "state" if known:
                state = source.choice([InstanceState.READY, InstanceState.DRAINING])
                fleet[name] = replace(known, state=state)
        if name in fleet:
            index.put(fleet[name])

        request = TransferRequest(prompt_tokens=source.choice([None, 100]))
        costs = [
            cost(prefill, decode)
            for prefill, decode in product(fleet.values(), fleet.values())
            if prefill is not decode
            and prefill.role in ("prefill", "both")
            and decode.role in ("decode", "both")
            and prefill.layout.dtype == decode.layout.dtype
            and all(
                i.state is InstanceState.READY
                and i.layout.blocks_for(request.prompt_tokens or 0)
                <= min(i.num_blocks - i.reserved.blocks, i.load.free_blocks or i.num_blocks)
                for i in (prefill, decode)
            )
        ]
        if not costs:
            with pytest.raises(NoCapacity):
                index.choose(request)
            continue
        served += 1
        pair = index.choose(request)
        assert cost(pair.prefill, pair.decode) == min(costs)
        assert pair == choose_pair(fleet.values(), request)
    assert served > 100
