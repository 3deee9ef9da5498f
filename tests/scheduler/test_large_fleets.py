"""Fleets of thousands: the cost of a choice, a refusal and a heartbeat does not grow with them.

Refusals and choices of the index are also compared with a look at each instance.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kvxfer.errors import KvxferError, NoCapacity, NotAggregating, PromptTooLong
from kvxfer.instances import Instance, InstanceState, Load, Reserved, Role
from kvxfer.model_identity import ModelIdentity
from kvxfer.scheduler.pair_index import PairIndex
from kvxfer.scheduler.pairing import SIDES, kind_of, mismatch_of, prompt_blocks
from kvxfer.scheduler.scoring import WeightedScorer, available_blocks
from kvxfer.scheduler.topology import distance, place_of
from kvxfer.transfers import TransferRequest
from tests.work import steps_of

from .test_pairing import instance

ROLES = ("prefill", "decode")
FULL = Load(free_blocks=0, running=5)


def fleet_of(count: int, load: Load, **more: object) -> list[Instance]:
    return [instance(f"i{n:05}", ROLES[n % 2], load=load, **more) for n in range(count)]


def refusal_of(index: PairIndex, request: TransferRequest) -> KvxferError:
    with pytest.raises((NoCapacity, PromptTooLong, NotAggregating)) as refused:
        index.choose(request)
    return refused.value


@pytest.mark.parametrize(
    "request_",
    [
        TransferRequest(prompt_tokens=100),
        TransferRequest(model="llama", prompt_tokens=100, avoid=("i00001",)),
        TransferRequest(model="alias", prompt_tokens=100),
        TransferRequest(aggregated=True, prompt_tokens=100),
        TransferRequest(prompt_tokens=10_000_000),
    ],
)
def test_refusal_costs_the_same_in_a_large_fleet(request_):
    full = replace(FULL, models=("alias",))
    few, many = (PairIndex(fleet_of(n, full, aggregates=True)) for n in (20, 4000))
    works = [steps_of(refusal_of, index, request_) for index in (few, many)]
    assert works[1] < 1.2 * works[0]


def test_choice_among_many_full_instances_finds_the_few_that_have_room():
    works = []
    for count in (400, 6400):
        fleet = fleet_of(count, FULL)
        for i in (0, 1):
            fleet[-2 + i] = replace(fleet[-2 + i], load=Load(running=9))
        index = PairIndex(fleet)
        works.append(steps_of(index.choose, TransferRequest(prompt_tokens=16)))
        pair = index.choose(TransferRequest(prompt_tokens=16))
        assert (pair.prefill, pair.decode) == tuple(fleet[-2:])
    assert works[1] < 1.2 * works[0]


def test_adapters_of_each_instance_do_not_slow_choices():
    def index_of(count: int) -> PairIndex:
        fleet = fleet_of(count, Load())
        named = [replace(i, load=Load(models=(f"a{n // 2}", "alias"))) for n, i in enumerate(fleet)]
        return PairIndex(named)

    few, many = index_of(40), index_of(2000)
    for request in (TransferRequest(), TransferRequest(model="a7"), TransferRequest(model="alias")):
        works = [steps_of(index.choose, request) for index in (few, many)]
        assert works[1] < 1.5 * works[0], request.model
    pair = many.choose(TransferRequest(model="a7"))
    assert (pair.prefill.instance_id, pair.decode.instance_id) == ("i00014", "i00015")

    loaded = instance("i00000", "prefill", load=Load(models=("new",), running=1))
    beats = [steps_of(index.put, loaded) for index in (few, many)]
    assert beats[1] < 1.2 * beats[0], "a heartbeat with a new adapter"
    assert many.find(TransferRequest(model="a0")) is None
    assert "no prefill instance of model 'a0' is ready (none registered)" in str(
        refusal_of(many, TransferRequest(model="a0")).details
    )


def blocks_for(i: Instance, request: TransferRequest, side: Role | None) -> int:
    """Returns the blocks that a request needs on a side, if all instances are of one size."""
    prompt = prompt_blocks(i, request)
    if side is Role.PREFILL and not request.aggregated:
        return prompt
    whole = (request.prompt_tokens or 0) + (request.output_tokens or 0)
    return max(prompt, min(-(-whole // i.layout.block_size), i.num_blocks))


def reasons_the_slow_way(fleet: Sequence[Instance], request: TransferRequest) -> KvxferError | None:
    """Returns the refusal from a look at every instance; None if there is a pair."""
    model = "" if request.model is None else f" of model {request.model!r}"
    version = request.weights_version
    serving = [i for i in fleet if i.serves(request.model)]
    if request.aggregated and serving:
        serving = [i for i in serving if i.aggregates]
        if not serving:
            return NotAggregating("none alone")
    fitting_version = [i for i in serving if version in (None, i.weights_version)]
    if serving and not fitting_version:
        told = Counter(i.weights_version for i in serving if i.weights_version is not None)
        there = [f"{v} ({n})" for v, n in sorted(told.items())]
        if len(serving) > told.total():
            there.append(f"not told ({len(serving) - told.total()})")
        said = f"no instance{model} serves weights version {version}; there are {', '.join(there)}"
        return NoCapacity("", reasons=[said])
    ready = [i for i in fitting_version if i.state is InstanceState.READY]
    groups = (
        [("instance", ready)]
        if request.aggregated
        else [(f"{side} instance", [i for i in ready if i.role.serves(side)]) for side in SIDES]
    )
    for what, group in groups:
        if group and all(prompt_blocks(i, request) > i.num_blocks for i in group):
            return PromptTooLong(what)
    of_model = model
    if version is not None and not request.aggregated:
        of_model += f" with weights version {version}"
    if not fitting_version:
        return NoCapacity("", reasons=[f"no instance{of_model} is registered"])
    reasons, fits = [], []
    for what, group in groups:
        side = None if request.aggregated else Role(what.split()[0])
        fits.append([i for i in group if blocks_for(i, request, side) <= available_blocks(i)])
        if not group:
            others = [i for i in fitting_version if side is None or i.role.serves(side)]
            states = Counter(i.state.value for i in others)
            told = ", ".join(f"{n} {s}" for s, n in sorted(states.items())) or "none registered"
            reasons.append(f"no {what}{of_model} is ready ({told})")
        elif not fits[-1]:
            most = min(group, key=lambda i: (-available_blocks(i), i.instance_id))
            reasons.append(
                f"no {what}{of_model} has the {blocks_for(most, request, side)} KV blocks free "
                f"(most: {most.instance_id!r} with {available_blocks(most)})"
            )
    if reasons:
        return NoCapacity("", reasons=reasons)
    if request.aggregated:
        return None
    pairs = [(p, d) for p in fits[0] for d in fits[1] if p is not d]
    if any(mismatch_of(kind_of(p), kind_of(d)) is None for p, d in pairs):
        return None
    return NoCapacity("", reasons=[])


def cost_of(prefill: Instance, decode: Instance, request: TransferRequest) -> float:
    scorer = WeightedScorer()
    apart = distance(place_of(prefill.labels), place_of(decode.labels))
    return scorer.load(prefill) + scorer.load(decode) + scorer.pair(apart, 0, 0)


def test_index_agrees_with_a_look_at_each_instance(seed):
    """Fleets of up to 150 that change one instance at a time: few or many of them have room."""
    source = random.Random(seed)
    index, fleet = PairIndex(), dict[str, Instance]()
    outcomes, labelled = Counter[str](), source.random() < 0.5
    for step in range(1500):
        name, size = f"i{source.randrange(150)}", source.random()
        known = fleet.get(name)
        if known is None or source.random() < 0.05:
            if known is not None:
                index.remove(name)
            version = source.choice([None, 7, 8])
            fleet[name] = instance(
                name,
                source.choice(["prefill", "decode", "both"]),
                model=source.choice(["llama"] * 5 + ["qwen"]),
                block_size=source.choice([16, 32]),
                dtype=source.choice(["float32"] * 4 + ["int8"]),
                labels={"host": source.choice("xyz")} if labelled else {},
                aggregates=source.random() < 0.2,
                identity=None if version is None else ModelIdentity(weights_version=version),
            )
            fleet[name] = replace(fleet[name], epoch=step + 1)
        else:
            held = source.choice([0, 0, 20, 60, 64, 64])
            fleet[name] = replace(
                known,
                state=source.choice([InstanceState.READY] * 9 + [InstanceState.DRAINING]),
                load=Load(
                    running=source.randrange(6),
                    free_blocks=source.choice([None, 0, 3, 64]),
                    models=tuple(source.sample(["alias", "sql", f"a{name}"], source.randrange(3))),
                ),
                reserved=Reserved(transfers=source.randrange(4), blocks=held),
            )
        index.put(fleet[name])
        if source.random() < 0.02:
            for gone in source.sample(sorted(fleet), source.randrange(len(fleet) + 1)):
                index.remove(gone)
                del fleet[gone]

        request = TransferRequest(
            model=source.choice([None, "llama", "qwen", "alias", "sql", f"a{name}", "other"]),
            prompt_tokens=source.choice([None, 100, int(1100 * size), 5000]),
            output_tokens=source.choice([None, 50, 500, 5000]),
            weights_version=source.choice([None] * 6 + [7, 9]),
            aggregated=source.random() < 0.2,
        )
        expected = reasons_the_slow_way(list(fleet.values()), request)
        outcomes[type(expected).__name__] += 1
        if expected is not None:
            said = refusal_of(index, request)
            assert type(said) is type(expected)
            reasons = getattr(expected, "details", {}).get("reasons")
            assert not reasons or getattr(said, "details", {}) == {"reasons": reasons}
            continue
        pair = index.choose(request)
        takes_part = [
            i
            for i in fleet.values()
            if i.state is InstanceState.READY
            and i.serves(request.model)
            and request.weights_version in (None, i.weights_version)
        ]

        def fits(i: Instance, side: Role, request: TransferRequest = request) -> bool:
            return blocks_for(i, request, side) <= available_blocks(i)

        if request.aggregated:
            alone = [i for i in takes_part if i.aggregates and fits(i, Role.DECODE)]
            loads = [WeightedScorer().load(i) for i in alone]
            assert WeightedScorer().load(pair.prefill) == min(loads)
            continue
        assert cost_of(pair.prefill, pair.decode, request) == min(
            cost_of(prefill, decode, request)
            for prefill in takes_part
            if prefill.role.serves(Role.PREFILL) and fits(prefill, Role.PREFILL)
            for decode in takes_part
            if decode is not prefill
            and decode.role.serves(Role.DECODE)
            and fits(decode, Role.DECODE)
            and mismatch_of(kind_of(prefill), kind_of(decode)) is None
        )
    assert min(outcomes[name] for name in ("NoneType", "NoCapacity", "PromptTooLong")) > 50
