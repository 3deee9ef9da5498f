from __future__ import annotations

import random
from itertools import permutations, product
from typing import Any

import pytest
from msgspec.structs import replace

from kvxfer.errors import LayoutMismatch, NoCapacity, NotAggregating, PromptTooLong
from kvxfer.instances import Instance, InstanceState, Load, Reserved
from kvxfer.model_identity import ModelIdentity
from kvxfer.scheduler.pair_index import PairIndex, choose_pair
from kvxfer.scheduler.pairing import check_pair, common_fabrics
from kvxfer.scheduler.scoring import available_blocks
from kvxfer.transfers import TransferRequest
from verify.processes.control_plane import worker


def instance(
    instance_id: str,
    role: str,
    *,
    state: str = "ready",
    load: Load | None = None,
    transfers: int = 0,
    blocks: int = 0,
    **spec: Any,
) -> Instance:
    registered = worker(instance_id, role, **spec)
    return Instance(
        **{name: getattr(registered, name) for name in registered.__struct_fields__},
        epoch=1,
        state=InstanceState(state),
        registered_at=0.0,
        heartbeat_at=0.0,
        load=load or Load(),
        reserved=Reserved(transfers=transfers, blocks=blocks),
    )


def chosen(fleet: list[Instance], **request: Any) -> tuple[str, str]:
    pair = choose_pair(fleet, TransferRequest(**request))
    return pair.prefill.instance_id, pair.decode.instance_id


P, D = instance("p", "prefill"), instance("d", "decode")


def full(name: str, *, queues: bool, running: int = 0) -> Instance:
    return instance(name, "decode", load=Load(free_blocks=0, queues=queues, running=running))


def with_names(name: str, role: str) -> Instance:
    return instance(name, role, load=Load(models=("alias", "sql"), running=5))


@pytest.mark.parametrize(
    ("fleet", "request_", "expected"),
    [
        ([P, D], {}, ("p", "d")),
        ([P, instance("p2", "prefill"), D], {"avoid": ("p",)}, ("p2", "d")),
        # an avoided worker is the last resort, on one side rather than on both
        ([P, D], {"avoid": ("p", "d")}, ("p", "d")),
        ([P, D, instance("e", "decode")], {"avoid": ("p", "d")}, ("p", "e")),
        ([P, instance("q", "prefill"), D], {"avoid": ("p", "d")}, ("q", "d")),
        # a full cache rules out a worker that then refuses requests, not one that lets them wait
        (
            [P, full("c", queues=False), full("e", queues=True, running=3)],
            {"prompt_tokens": 40},
            ("p", "e"),
        ),
        # aliases and adapters that both have
        (
            [P, with_names("q", "prefill"), D, with_names("e", "decode")],
            {"model": "sql"},
            ("q", "e"),
        ),
        # least loaded: running, waiting and reserved count alike
        ([instance("p1", "prefill", load=Load(running=1)), P, D], {}, ("p", "d")),
        ([P, instance("d1", "decode", load=Load(waiting=1)), D], {}, ("p", "d")),
        ([P, instance("d1", "decode", transfers=1), D], {}, ("p", "d")),
        (
            [
                instance("p1", "prefill", load=Load(running=2)),
                instance("p2", "prefill", load=Load(running=1), transfers=2),
                D,
            ],
            {},
            ("p1", "d"),
        ),
        # equally many requests: the emptier KV cache, then the first by id
        ([P, D, instance("c", "decode", load=Load(free_blocks=10))], {}, ("p", "d")),
        ([P, D, instance("c", "decode", blocks=1)], {}, ("p", "d")),
        ([P, D, instance("c", "decode")], {}, ("p", "c")),
        # only ready instances
        ([P, instance("c", "decode", state="draining"), D], {}, ("p", "d")),
        ([P, instance("c", "decode", state="joining"), D], {}, ("p", "d")),
        # only the side that an instance takes; `both` takes either
        ([instance("a", "both"), D], {}, ("a", "d")),
        ([P, instance("a", "both")], {}, ("p", "a")),
        # never one instance with itself
        ([instance("a", "both"), instance("b", "both", load=Load(running=9))], {}, ("a", "b")),
        (
            [instance("a", "both"), instance("b", "prefill", load=Load(running=9)), P],
            {},
            ("p", "a"),
        ),
        # one model
        (
            [P, instance("c", "decode", model="qwen"), D],
            {},
            ("p", "d"),
        ),
        (
            [P, D, instance("p2", "prefill", model="qwen"), instance("d2", "decode", model="qwen")],
            {"model": "qwen"},
            ("p2", "d2"),
        ),
        # layouts that map: the lighter instances do not match each other
        (
            [
                instance("p16", "prefill"),
                instance("p8", "prefill", load=Load(running=5), dtype="int8"),
                instance("d16", "decode", load=Load(running=9)),
                instance("d8", "decode", dtype="int8"),
            ],
            {},
            ("p8", "d8"),
        ),
        # block sizes may differ: 160 tokens are 10 blocks and 5
        (
            [P, instance("d32", "decode", block_size=32, load=Load(free_blocks=5))],
            {"prompt_tokens": 160},
            ("p", "d32"),
        ),
        # a fabric in common
        (
            [P, instance("c", "decode", fabrics=("verbs",)), D],
            {},
            ("p", "d"),
        ),
        # blocks for the whole prompt, neither reserved nor in use: 160 tokens are 10 blocks
        ([P, instance("c", "decode", blocks=55), D], {"prompt_tokens": 160}, ("p", "d")),
        (
            [P, instance("c", "decode", load=Load(free_blocks=9)), D],
            {"prompt_tokens": 160},
            ("p", "d"),
        ),
        (
            [
                P,
                instance("c", "decode", blocks=54),
                instance("d", "decode", load=Load(running=1)),
            ],
            {"prompt_tokens": 160},
            ("p", "c"),
        ),
        # a reserved block may be in use already: 30 used and 30 reserved of 64 leave 34
        (
            [P, instance("c", "decode", blocks=30, load=Load(free_blocks=34))],
            {"prompt_tokens": 34 * 16},
            ("p", "c"),
        ),
    ],
)
def test_pair(fleet, request_, expected):
    assert chosen(fleet, **request_) == expected
    assert chosen(fleet[::-1], **request_) == expected, "the order of the fleet decides nothing"


def test_pair_says_how_many_blocks_each_side_needs():
    pair = choose_pair([P, D], TransferRequest(prompt_tokens=33))
    assert (pair.prefill_blocks, pair.decode_blocks) == (3, 3)
    pair = choose_pair([P, D], TransferRequest())
    assert (pair.prefill_blocks, pair.decode_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("fleet", "request_", "reasons"),
    [
        ([], {}, ["no instance is registered"]),
        ([P, D], {"model": "qwen"}, ["no instance of model 'qwen' is registered"]),
        ([P], {}, ["no decode instance is ready (none registered)"]),
        (
            [instance("p", "prefill", state="joining"), instance("d", "decode", state="draining")],
            {"model": "llama"},
            [
                "no prefill instance of model 'llama' is ready (1 joining)",
                "no decode instance of model 'llama' is ready (1 draining)",
            ],
        ),
        (
            [P, instance("d", "decode", blocks=60), instance("e", "decode", blocks=61)],
            {"prompt_tokens": 80},
            ["no decode instance has the 5 KV blocks free (most: 'd' with 4)"],
        ),
        (
            [P, instance("d", "decode", dtype="bfloat16")],
            {},
            ["prefill 'p' and decode 'd' do not match: dtype is 'float32' and 'bfloat16'"],
        ),
        (
            [P, instance("d", "decode", model="qwen")],
            {},
            ["prefill 'p' and decode 'd' do not match: model is 'llama' and 'qwen'"],
        ),
        (
            [P, instance("d", "decode", fabrics=("verbs",))],
            {},
            ["prefill 'p' and decode 'd' do not match: fabrics is ['local', 'tcp'] and ['verbs']"],
        ),
        ([instance("a", "both")], {}, ["only one instance is ready, and a transfer takes two"]),
    ],
)
def test_refusal_says_what_is_missing(fleet, request_, reasons):
    with pytest.raises(NoCapacity) as refusal:
        choose_pair(fleet, TransferRequest(**request_))
    assert refusal.value.details == {"reasons": reasons}


def test_refusal_does_not_depend_on_the_order_of_instances():
    decodes = [instance(name, "decode", blocks=60) for name in ("d2", "d1", "d3")]
    for order in permutations([instance("p", "prefill", num_blocks=1000), *decodes]):
        with pytest.raises(NoCapacity) as full:
            choose_pair(order, TransferRequest(prompt_tokens=80))
        assert "most: 'd1' with 4" in str(full.value.details)
        with pytest.raises(PromptTooLong, match="largest ready decode instance, 'd1'"):
            choose_pair(order, TransferRequest(prompt_tokens=2000))


def test_many_mismatches_are_counted_not_listed():
    fleet = [
        P,
        *(instance(f"d{n}", "decode", block_size=n) for n in (1997, 1999, 2003, 2011, 2017)),
    ]
    with pytest.raises(NoCapacity) as refusal:
        choose_pair(fleet, TransferRequest())
    reasons = refusal.value.details["reasons"]
    assert isinstance(reasons, list)
    assert len(reasons) == 4
    assert reasons[-1] == "and 2 more like this"


def test_prompt_that_fits_no_cache_is_too_long_and_one_for_a_full_cache_waits():
    small = instance("d", "decode", num_blocks=32)
    with pytest.raises(PromptTooLong, match=r"600 tokens takes 38 KV blocks.*decode.*'d', has 32"):
        choose_pair([P, small], TransferRequest(prompt_tokens=600))
    with pytest.raises(NoCapacity):
        choose_pair(
            [P, replace(small, reserved=Reserved(blocks=32))], TransferRequest(prompt_tokens=16)
        )


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((64, 64), (7, 13)),
        ((64, 10), (7, 10)),  # no more than the largest has
        ((64, 7), (7, 7)),
    ],
)
def test_decode_takes_blocks_for_the_expected_output_up_to_its_size(sizes, blocks):
    fleet = [
        instance(role[0], role, num_blocks=size)
        for role, size in zip(("prefill", "decode"), sizes, strict=True)
    ]
    pair = choose_pair(fleet, TransferRequest(prompt_tokens=100, output_tokens=100))
    assert (pair.prefill_blocks, pair.decode_blocks) == blocks
    busy = replace(fleet[1], reserved=Reserved(blocks=fleet[1].num_blocks - blocks[1] + 1))
    with pytest.raises(NoCapacity) as refused:
        choose_pair([fleet[0], busy], TransferRequest(prompt_tokens=100, output_tokens=100))
    assert f"has the {blocks[1]} KV blocks free" in str(refused.value.details)


def test_expected_output_is_bounded_by_the_instances_that_serve_the_model():
    """A larger instance without the adapter does not count."""
    adapted = Load(models=("sql",))
    fleet = [
        instance("p", "prefill", load=adapted),
        instance("d", "decode", load=adapted, num_blocks=10, aggregates=True),
        instance("large", "decode", num_blocks=640, aggregates=True),
    ]
    request = TransferRequest(model="sql", prompt_tokens=100, output_tokens=1000)
    assert choose_pair(fleet, request).decode_blocks == 10
    assert choose_pair(fleet, replace(request, aggregated=True)).prefill_blocks == 10


def test_choice_is_the_best_of_all_pairs(seed):
    """Compares with the slow way: look at every pair."""
    source = random.Random(seed)
    served = 0
    for _ in range(300):
        fleet = [
            instance(
                f"i{number}",
                source.choice(["prefill", "decode", "both"]),
                state=source.choice(["ready", "ready", "ready", "draining"]),
                load=Load(running=source.randrange(4), free_blocks=source.choice([None, 5, 40])),
                transfers=source.randrange(3),
                blocks=source.randrange(64),
                block_size=source.choice([16, 32]),
                dtype=source.choice(["float32", "int8"]),
                model=source.choice(["llama", "qwen"]),
            )
            for number in range(source.randrange(1, 9))
        ]
        request = TransferRequest(
            model=source.choice([None, "llama"]), prompt_tokens=source.choice([None, 16, 200])
        )

        def weight(pair: tuple[Instance, Instance]) -> tuple[object, ...]:
            loads = [i.load.running + i.load.waiting + i.reserved.transfers for i in pair]
            used = [1 - available_blocks(i) / i.num_blocks for i in pair]
            return sum(loads), sum(used), pair[0].instance_id, pair[1].instance_id

        possible = []
        for prefill, decode in product(fleet, fleet):
            sides = (prefill, decode)
            if (
                prefill is not decode
                and prefill.role in ("prefill", "both")
                and decode.role in ("decode", "both")
                and all(i.state is InstanceState.READY for i in sides)
                and prefill.model == decode.model
                and request.model in (None, prefill.model)
                and prefill.layout.dtype == decode.layout.dtype
                and all(
                    -(-(request.prompt_tokens or 0) // i.layout.block_size) <= available_blocks(i)
                    for i in sides
                )
            ):
                possible.append(sides)
        if not possible:
            with pytest.raises(NoCapacity):
                choose_pair(fleet, request)
            continue
        served += 1
        pair = choose_pair(fleet, request)
        assert weight((pair.prefill, pair.decode)) == min(map(weight, possible))
    assert served > 20


def alone(name: str, role: str = "both", **more: Any) -> Instance:
    return instance(name, role, aggregates=True, **more)


@pytest.mark.parametrize(
    ("fleet", "request_", "expected"),
    [
        ([alone("b")], {}, "b"),
        ([P, D, alone("b", load=Load(running=9))], {}, "b"),
        # the least loaded of either side
        ([alone("p1", "prefill", load=Load(running=1)), alone("d1", "decode")], {}, "d1"),
        ([alone("p1", "prefill"), alone("d1", "decode", transfers=1)], {}, "p1"),
        ([alone("a"), alone("b")], {"avoid": ("a",)}, "b"),
        ([alone("a")], {"avoid": ("a",)}, "a"),
        ([alone("a", state="draining"), alone("b")], {}, "b"),
        ([alone("a", blocks=60), alone("b")], {"prompt_tokens": 16 * 10}, "b"),
        ([alone("a", model="qwen"), alone("b", load=Load(models=("sql",)))], {"model": "sql"}, "b"),
    ],
)
def test_an_aggregated_request_gets_one_instance_that_serves_it_alone(fleet, request_, expected):
    pair = choose_pair(fleet, TransferRequest(aggregated=True, **request_))
    assert (pair.prefill.instance_id, pair.decode.instance_id) == (expected, expected)
    assert (pair.prefill_blocks, pair.decode_blocks) == (
        pair.prefill.layout.blocks_for(request_.get("prompt_tokens", 0)),
        0,
    )


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        ([], "no instance of model 'llama' is registered"),
        ([alone("a", state="joining")], "no instance of model 'llama' is ready (1 joining)"),
        (
            [alone("a", blocks=60), alone("b", "prefill", blocks=62)],
            "no instance of model 'llama' has the 10 KV blocks free (most: 'a' with 4)",
        ),
    ],
)
def test_refusal_of_an_aggregated_request_says_what_is_missing(fleet, reason):
    request = TransferRequest(aggregated=True, model="llama", prompt_tokens=16 * 10)
    with pytest.raises(NoCapacity) as refused:
        choose_pair(fleet, request)
    assert refused.value.details["reasons"] == [reason]


ALONE = alone("b", "decode")


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        # no prefill, or none that is ready
        ([ALONE, alone("c", "decode", load=Load(running=1))], ("b", "b")),
        ([instance("p", "prefill", state="draining"), ALONE], ("b", "b")),
        ([instance("p", "prefill", model="qwen"), ALONE], ("b", "b")),
        # no decode
        ([alone("p", "prefill")], ("p", "p")),
        # only one worker, of both roles
        ([alone("x")], ("x", "x")),
        # two that do not match
        ([instance("p", "prefill", dtype="int8"), ALONE], ("b", "b")),
        # a pair is preferred
        ([P, ALONE], ("p", "b")),
        ([alone("x"), alone("y")], ("x", "y")),
    ],
)
def test_a_request_that_may_be_aggregated_is_aggregated_if_there_is_no_pair(fleet, expected):
    assert chosen(fleet, or_aggregated=True, model="llama") == expected


def test_a_request_that_may_be_aggregated_waits_for_a_pair_without_room():
    full = instance("p", "prefill", blocks=64)
    with pytest.raises(NoCapacity, match="no pair of instances"):
        choose_pair([full, ALONE], TransferRequest(or_aggregated=True, prompt_tokens=16))
    with pytest.raises(NoCapacity, match="no instance can serve the request alone"):
        choose_pair(
            [alone("b", "decode", blocks=64)],
            TransferRequest(or_aggregated=True, prompt_tokens=16),
        )
    with pytest.raises(NoCapacity) as refused:
        choose_pair([D], TransferRequest(or_aggregated=True))
    assert refused.value.details["reasons"] == ["no prefill instance is ready (none registered)"]


def test_a_fleet_that_serves_pairs_only_says_so():
    request = TransferRequest(aggregated=True, model="llama")
    with pytest.raises(NotAggregating, match="no instance of model 'llama' serves requests alone"):
        choose_pair([P, D], request)
    with pytest.raises(PromptTooLong, match="the largest ready instance, 'a', has 64"):
        choose_pair([alone("a")], replace(request, prompt_tokens=16 * 65))


def test_adapters_come_and_go_with_the_load():
    index = PairIndex([P, D])
    asked = TransferRequest(model="sql")
    assert index.find(asked) is None
    with pytest.raises(NoCapacity) as refused:
        index.choose(asked)
    assert refused.value.details["reasons"] == ["no instance of model 'sql' is registered"]
    index.put(with_names("p", "prefill"))
    assert index.find(asked) is None, "decode does not have it yet"
    index.put(with_names("d", "decode"))
    assert index.choose(asked).decode.instance_id == "d"
    assert index.find(TransferRequest(model=P.model)) is not None
    index.put(D)
    assert index.find(asked) is None


def test_models_and_versions_that_differ_make_no_pair():
    one, other = (ModelIdentity(checkpoint=letter * 32) for letter in "ab")
    prefill, decode = replace(P, identity=one), replace(D, identity=other)
    with pytest.raises(NoCapacity) as refused:
        choose_pair([prefill, decode], TransferRequest())
    assert refused.value.details["reasons"] == [
        f"prefill 'p' and decode 'd' do not match: checkpoint is {'a' * 32!r} and {'b' * 32!r}"
    ]
    assert chosen([prefill, decode, replace(D, instance_id="e", identity=one)]) == ("p", "e")
    assert chosen([prefill, D]) == ("p", "d"), "an instance that reports no identity"
    newer = replace(D, kv_versions=(9, 10))
    with pytest.raises(NoCapacity) as refused:
        choose_pair([P, newer], TransferRequest())
    assert "kv_versions is (7, 8) and (9, 10)" in refused.value.details["reasons"][0]
    assert chosen([replace(P, kv_versions=(8, 9)), newer]) == ("p", "d")


def test_check_pair_names_the_first_thing_that_differs():
    check_pair(P, D)
    with pytest.raises(LayoutMismatch) as mismatch:
        check_pair(P, instance("d", "decode", block_size=32, dtype="int8"))
    assert (mismatch.value.field, mismatch.value.prefill, mismatch.value.decode) == (
        "dtype",
        "float32",
        "int8",
    )


def test_common_fabrics_come_in_the_order_of_prefill():
    decode = instance("d", "decode", fabrics=("tcp", "verbs", "local"))
    assert common_fabrics(P, decode) == ("local", "tcp")
