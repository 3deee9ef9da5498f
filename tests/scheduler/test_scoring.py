"""Weights decide, parts add up to the cost, and a scorer of a third party can replace both."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import permutations, product

import pytest
from msgspec.structs import replace

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import ScorerFailed
from kvxfer.instances import (
    BlockUpdate,
    Instance,
    InstanceState,
    Load,
    Prefilling,
    Reserved,
)
from kvxfer.prefix_hashes import pack
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.pair_index import PairIndex, choose_pair
from kvxfer.scheduler.pairing import fabric_steps, kind_of
from kvxfer.scheduler.scoring import Scorer, WeightedScorer, Weights
from kvxfer.scheduler.topology import distance, place_of
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import Score, TransferRequest
from verify.processes.control_plane import worker

from .test_pair_index import at
from .test_pairing import instance


def chosen(fleet: list[Instance], weights: Weights) -> tuple[str, str]:
    pair = choose_pair(fleet, TransferRequest(), scorer=WeightedScorer(weights))
    return pair.prefill.instance_id, pair.decode.instance_id


P = instance("p", "prefill")
NEAR, FAR = "z/r/h/0", "y/r/h/0"
RUNNING = instance("c", "decode", load=Load(running=2))
WAITING = instance("d", "decode", load=Load(waiting=2))
RESERVED = instance("e", "decode", transfers=2)
FULL = instance("c", "decode", load=Load(free_blocks=8))
BUSY = instance("d", "decode", load=Load(running=1))
VERBS = instance("p", "prefill", fabrics=("verbs", "tcp"))


@pytest.mark.parametrize(
    ("fleet", "weights", "expected"),
    [
        # all three kinds of requests alike: the id decides
        ([P, RUNNING, WAITING, RESERVED], {}, ("p", "c")),
        ([P, RUNNING, WAITING, RESERVED], {"running": 1.1}, ("p", "d")),
        ([P, RUNNING, WAITING, RESERVED], {"running": 2, "waiting": 1.5}, ("p", "e")),
        ([P, RUNNING, WAITING, RESERVED], {"waiting": 0.5}, ("p", "d")),
        ([P, RUNNING, WAITING, RESERVED], {"reserved": 0}, ("p", "e")),
        # 7/8 of a full cache against one request
        ([P, FULL, BUSY], {}, ("p", "c")),
        ([P, FULL, BUSY], {"occupancy": 1}, ("p", "c")),
        ([P, FULL, BUSY], {"occupancy": 1.2}, ("p", "d")),
        # four steps against one request
        (
            [at("p", "prefill", NEAR), at("c", "decode", NEAR, running=1), at("d", "decode", FAR)],
            {},
            ("p", "c"),
        ),
        (
            [at("p", "prefill", NEAR), at("c", "decode", NEAR, running=1), at("d", "decode", FAR)],
            {"distance": 0.2},
            ("p", "d"),
        ),
        # one fabric against one request
        (
            [
                VERBS,
                instance("c", "decode", fabrics=("tcp",)),
                instance("d", "decode", fabrics=("verbs",), load=Load(running=1)),
            ],
            {},
            ("p", "c"),
        ),
        (
            [
                VERBS,
                instance("c", "decode", fabrics=("tcp",)),
                instance("d", "decode", fabrics=("verbs",), load=Load(running=1)),
            ],
            {"fabric": 1.5},
            ("p", "d"),
        ),
    ],
)
def test_weights_decide(fleet, weights, expected):
    assert chosen(fleet, Weights(**weights)) == expected
    assert chosen(fleet[::-1], Weights(**weights)) == expected


def test_request_that_asks_gets_the_score():
    fleet = [
        at("p", "prefill", "z/r/h/0", running=2),
        at("d", "decode", "z/r/h/1", running=1),
    ]
    pair = choose_pair(fleet, TransferRequest(explain=True))
    assert pair.score == Score(
        cost=4.0,
        prefill={"running": 2.0, "waiting": 0.0, "tokens": 0.0, "reserved": 0.0, "occupancy": 0.0},
        decode={
            "running": 1.0,
            "waiting": 0.0,
            "tokens": 0.0,
            "reserved": 0.0,
            "occupancy": 0.0,
            "decode_prefix": 0.0,
        },
        pair={"distance": 1.0, "fabric": 0.0, "prefix": 0.0},
        distance=1,
        prefix_tokens=0,
    )
    assert choose_pair(fleet, TransferRequest()).score is None


@pytest.mark.parametrize(
    ("running", "waiting", "transfers", "tokens", "cost"),
    [
        (2, 1, 0, 0, 3.0),
        # the requests of its open transfers count once, and by their tokens
        (1, 1, 2, 200, 2 + 0.1),
        (0, 1, 1, 100_000, 1 + 50.0),
        # requests from elsewhere count as before
        (2, 3, 4, 8_000, 1 + 4 + 4.0),
        # transfers that have not reached it yet, of prompts that it has cached
        (0, 0, 3, 0, 3.0),
    ],
)
def test_prefill_counts_the_tokens_of_its_open_transfers(running, waiting, transfers, tokens, cost):
    prefill = replace(
        instance("p", "prefill", load=Load(running=running, waiting=waiting)),
        reserved=Reserved(transfers=transfers),
        prefilling=Prefilling(transfers=transfers, tokens=tokens),
    )
    scorer = WeightedScorer()
    assert scorer.load(prefill) == pytest.approx(cost)
    assert sum(scorer.load_parts(prefill).values()) == pytest.approx(cost)


@pytest.mark.parametrize("cached", [0, 5_000])
async def test_a_long_prompt_under_way_outweighs_two_short_ones(cached):
    registry = EmbeddedRegistry(LeasePolicy(600.0))
    for name in ("p1", "p2", "d1"):
        role = "prefill" if name[0] == "p" else "decode"
        await registry.register(worker(name, role, num_blocks=20_000), state=InstanceState.READY)
    lease = await registry.heartbeat("p1", (await registry.instance("p1")).epoch)
    hashes = tuple(range(1, cached // 16 + 1))
    if hashes:
        await registry.publish_blocks("p1", lease.epoch, BlockUpdate(added=hashes))

    async def opened(**request):
        request = TransferRequest(**request)
        return await open_transfer(registry, request, seconds=60, clock=SYSTEM_CLOCK)

    long = await opened(prompt_tokens=100_000, prefix_hashes=hashes)
    assert (long.prefill.instance_id, long.cached_tokens) == ("p1", len(hashes) * 16)
    for _ in range(2):
        await opened(prompt_tokens=100, avoid=("p1",))
    assert (await registry.instance("p1")).prefilling == Prefilling(
        transfers=1, tokens=100_000 - long.cached_tokens
    )
    short = await opened(prompt_tokens=100)
    assert short.prefill.instance_id == "p2"
    await registry.release(long.transfer_id)
    assert (await registry.instance("p1")).prefilling == Prefilling()


def test_parts_add_up_to_the_cost(seed):
    source = random.Random(seed)
    names = Weights.__struct_fields__
    for _ in range(100):
        scorer = WeightedScorer(Weights(**{name: source.random() * 3 for name in names}))
        fleet = [
            at(
                f"{role}{number}",
                role,
                f"{source.choice('xy')}/{source.choice('xy')}",
                running=source.randrange(9),
            )
            for role in ("prefill", "decode")
            for number in range(3)
        ]
        for one in fleet:
            assert scorer.load(one) == pytest.approx(sum(scorer.load_parts(one).values()))
        score = choose_pair(fleet, TransferRequest(explain=True), scorer=scorer).score
        assert score is not None
        parts = [*score.prefill.values(), *score.decode.values(), *score.pair.values()]
        assert score.cost == pytest.approx(sum(parts))


class Fewest(Scorer):
    """A scorer that prefers instances by a label and ignores the load."""

    def load_parts(self, instance: Instance) -> Mapping[str, float]:
        return {"price": float(instance.labels["price"])}

    def pair_parts(
        self, distance: int, fabric_steps: int, prefix_tokens: int
    ) -> Mapping[str, float]:
        return {}


def test_third_party_scorer_ranks_by_its_criterion():
    fleet = [
        instance("p", "prefill", labels={"price": "7"}),
        instance("q", "prefill", labels={"price": "5"}, load=Load(running=9)),
        instance("c", "decode", labels={"price": "1.5"}),
        instance("d", "decode", labels={"price": "1"}, load=Load(waiting=9)),
    ]
    pair = choose_pair(fleet, TransferRequest(explain=True), scorer=Fewest())
    assert (pair.prefill.instance_id, pair.decode.instance_id) == ("q", "d")
    assert pair.score is not None
    assert (pair.score.cost, pair.score.prefill) == (6.0, {"price": 5.0})


def priced(name: str, role: str, price: str) -> Instance:
    return instance(name, role, labels={"price": price})


@pytest.mark.parametrize("price", ["nan", "inf", "-inf", "cheap"])
def test_instance_without_a_cost_is_in_no_pair_and_logged_once(price, caplog):
    fleet = [priced("p", "prefill", "1"), priced("c", "decode", price), priced("d", "decode", "9")]
    for order in permutations(fleet):
        index = PairIndex(order, scorer=Fewest())
        index.put(priced("c", "decode", price))  # a heartbeat
        assert index.choose(TransferRequest()).decode.instance_id == "d"
        (line,) = caplog.messages
        assert line.startswith("the scorer Fewest cannot weigh instance 'c' (")
        assert price in line
        index.remove("d")
        with pytest.raises(ScorerFailed, match=r"instance 'c'.*correct the scorer"):
            index.choose(TransferRequest())
        caplog.clear()


def test_costs_too_large_to_add_up_are_a_named_error():
    fleet = [priced(role[0], role, "1e308") for role in ("prefill", "decode")]
    index = PairIndex(fleet, scorer=Fewest())
    with pytest.raises(ScorerFailed, match="scorer Fewest add up to inf"):
        index.choose(TransferRequest())


@pytest.mark.parametrize("cost", [float("nan"), float("inf")])
def test_pair_without_a_cost_is_a_named_error(cost):
    class Lost(Fewest):
        def pair_parts(self, *_: int) -> Mapping[str, float]:
            return {"lost": cost}

    index = PairIndex([priced("p", "prefill", "1"), priced("d", "decode", "1")], scorer=Lost())
    with pytest.raises(ScorerFailed, match=rf"the scorer Lost .*\(the cost is {cost}\)"):
        index.choose(TransferRequest())


@pytest.mark.parametrize("weight", [-0.1, 1e7, float("nan"), float("inf")])
def test_weight_out_of_bounds_is_refused(weight):
    with pytest.raises(ValueError, match=r"distance is .*; write 0 to 1000000"):
        Weights(distance=weight)


def test_no_pair_costs_less_than_the_chosen_one_with_any_weights(seed):
    """Compares with the slow way: each pair with its loads, place, fabrics and cached prefix."""
    source = random.Random(seed)
    hashes = tuple(range(100, 130))
    for _ in range(200):
        weights = {name: source.choice([0, 0.3, 1, 5]) for name in Weights.__struct_fields__}
        scorer = WeightedScorer(Weights(**weights))
        fleet = {
            f"i{number}": at(
                f"i{number}",
                source.choice(["prefill", "decode", "both"]),
                f"{source.choice('xy')}/{source.choice('xy')}",
                running=source.randrange(4),
                fabrics=source.choice([("tcp",), ("verbs", "tcp"), ("ofi", "verbs", "tcp")]),
            )
            for number in range(12)
        }
        index = PairIndex(fleet.values(), scorer=scorer)
        depths = {name: source.choice([0, 0, 3, 30]) for name in fleet}
        for name, depth in depths.items():
            index.publish(name, pack(hashes[:depth]), b"", reset=True)
        costs = {
            (prefill.instance_id, decode.instance_id): scorer.load(prefill)
            + scorer.load(decode)
            + scorer.pair(
                distance(place_of(prefill.labels), place_of(decode.labels)),
                fabric_steps(kind_of(prefill), kind_of(decode)),
                depths[prefill.instance_id] * 100,
            )
            + scorer.decode(depths[decode.instance_id] * 100)
            for prefill, decode in product(fleet.values(), fleet.values())
            if prefill is not decode
            and prefill.role in ("prefill", "both")
            and decode.role in ("decode", "both")
        }
        request = TransferRequest(prefix_hashes=hashes, tokens_per_hash=100, explain=True)
        if not costs:
            continue
        pair = index.choose(request)
        chosen = costs[pair.prefill.instance_id, pair.decode.instance_id]
        assert chosen == pytest.approx(min(costs.values()))
        assert pair.score is not None
        assert pair.score.cost == pytest.approx(chosen)
