"""Prompts go to workers that have their prefix, unless load outweighs it."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from kvxfer.instances import InstanceState, Load
from kvxfer.prefix_hashes import MAX_HASHES_PER_INSTANCE, chain_hashes, pack
from kvxfer.scheduler.pair_index import PairIndex
from kvxfer.scheduler.prefix_index import PrefixIndex
from kvxfer.scheduler.scoring import WeightedScorer
from kvxfer.scheduler.sent_prompts import SentPrompts
from kvxfer.transfers import Party, Transfer, TransferRequest

from .test_pairing import instance

A, B = chain_hashes(range(2000), 16), chain_hashes(range(9000, 11000), 16)
D = instance("d", "decode")


def busy(name: str, requests: int, **spec: object):
    return instance(name, "prefill", load=Load(running=requests), **spec)


@pytest.mark.parametrize(
    ("prefills", "published", "request_", "expected", "tokens"),
    [
        # no worker has it, or no prefix is asked for
        ([busy("p", 0), busy("q", 1)], {"q": B}, {"prefix_hashes": A}, "p", 0),
        ([busy("p", 0), busy("q", 1)], {"q": A}, {}, "p", 0),
        # 2,000 tokens are worth one request, and then the id decides
        ([busy("q", 0), busy("p", 1)], {"p": A}, {"prefix_hashes": A}, "p", 2000),
        ([busy("p", 0), busy("q", 1)], {"q": A}, {"prefix_hashes": A}, "p", 0),
        ([busy("p", 1), busy("q", 1)], {"q": A[:1]}, {"prefix_hashes": A}, "q", 16),
        ([busy("p", 0), busy("q", 2)], {"q": A}, {"prefix_hashes": A}, "p", 0),
        # the longer prefix
        (
            [busy("p", 0), busy("q", 0)],
            {"p": A[:10], "q": A[:11]},
            {"prefix_hashes": A},
            "q",
            176,
        ),
        # only every fourth hash was published: the deepest one names all before it
        ([busy("p", 0), busy("q", 0)], {"q": A[3::4]}, {"prefix_hashes": A[:10]}, "q", 128),
        # tokens per hash as the request says, never more than the prompt has
        (
            [busy("p", 0), busy("q", 0)],
            {"q": A[:2]},
            {"prefix_hashes": A[:2], "tokens_per_hash": 64},
            "q",
            128,
        ),
        (
            [busy("p", 0), busy("q", 0)],
            {"q": A[:2]},
            {"prefix_hashes": A[:2], "prompt_tokens": 20},
            "q",
            20,
        ),
        # a worker that has the prefix but cannot take the request does not count
        (
            [busy("p", 0), busy("q", 0, state="draining")],
            {"q": A},
            {"prefix_hashes": A},
            "p",
            0,
        ),
        (
            [busy("p", 0), busy("q", 0, blocks=64)],
            {"q": A},
            {"prefix_hashes": A, "prompt_tokens": 16},
            "p",
            0,
        ),
        ([busy("p", 0), busy("q", 0, model="qwen")], {"q": A}, {"prefix_hashes": A}, "p", 0),
        # blocks that decode has cached do not count for prefill
        ([busy("p", 0), busy("q", 1)], {"d": A}, {"prefix_hashes": A}, "p", 0),
    ],
)
def test_cached_prefix_is_weighed_against_load(prefills, published, request_, expected, tokens):
    index = PairIndex([*prefills, D])
    for name, hashes in published.items():
        index.publish(name, pack(hashes), b"", reset=False)
    pair = index.choose(TransferRequest(**request_, explain=True))
    assert pair.prefill.instance_id == expected
    assert pair.score is not None
    assert pair.score.prefix_tokens == tokens
    assert pair.score.pair["prefix"] == pytest.approx(-0.5 * tokens / 1000)


def test_the_only_holder_is_found_in_a_large_fleet():
    index = PairIndex([busy(f"p{n:03}", 0) for n in range(300)] + [D])
    index.publish("p250", pack(A), b"", reset=False)
    assert index.choose(TransferRequest(prefix_hashes=A)).prefill.instance_id == "p250"


def test_least_loaded_of_many_holders_is_found():
    """200 instances have the beginning, but none of the 100 that are idle."""
    idle = [busy(f"a{n:03}", 0) for n in range(100)]
    holders = [busy(f"b{n:03}", 1 + n // 10) for n in range(200)]
    index = PairIndex([*idle, *holders, D])
    for holder in holders:
        index.publish(holder.instance_id, pack(A[:1]), b"", reset=False)
    request = TransferRequest(prefix_hashes=A[:1], tokens_per_hash=4000)
    assert index.choose(request).prefill.instance_id == "b000"


def test_blocks_end_with_the_instance_and_with_its_registration():
    index = PairIndex([busy("p", 0), busy("q", 0), D])
    request = TransferRequest(prefix_hashes=A)
    index.publish("q", pack(A), b"", reset=False)
    index.put(busy("q", 0))
    assert index.choose(request).prefill.instance_id == "q", "a heartbeat changes nothing"
    index.put(replace(busy("q", 0), epoch=2))
    assert index.choose(request).prefill.instance_id == "p"
    index.publish("q", pack(A), b"", reset=False)
    index.remove("q")
    index.put(busy("q", 0))
    assert index.choose(request).prefill.instance_id == "p"


@pytest.mark.parametrize(("running", "expected"), [(0, "e"), (1, "d")])
def test_cached_blocks_decide_between_decodes_of_equal_load(running, expected):
    load = Load(running=running)
    index = PairIndex([busy("p", 0), D, instance("e", "decode", load=load)])
    index.publish("e", pack(A), b"", reset=False)
    pair = index.choose(TransferRequest(prefix_hashes=A, explain=True))
    assert pair.decode.instance_id == expected
    assert pair.score is not None
    cached = 2000 if expected == "e" else 0
    assert pair.score.decode_prefix_tokens == cached
    assert pair.score.decode["decode_prefix"] == pytest.approx(-0.05 * cached / 1000)


@pytest.mark.parametrize(
    ("most", "prompt", "cached", "expected"),
    [
        (0, 10, 0, ""),
        (100, None, 0, ""),
        (100, 100, 0, "d"),
        (100, 101, 0, ""),
        (100, 500, 25, "e"),  # 16 tokens each: 100 are missing
        (100, 501, 25, ""),
    ],
)
def test_decode_that_lacks_little_of_the_prompt_serves_it_alone(most, prompt, cached, expected):
    scorer = WeightedScorer()
    scorer.alone_tokens = most
    e = instance("e", "decode", load=Load(running=1), aggregates=True)
    index = PairIndex([busy("p", 0), replace(D, aggregates=True), e], scorer=scorer)
    index.publish("e", pack(A[:cached]), b"", reset=False)
    request = TransferRequest(prefix_hashes=A, prompt_tokens=prompt, explain=True)
    assert index.choose(request).prefill.instance_id == "p", "only if it may be aggregated"
    pair = index.choose(replace(request, or_aggregated=True))
    assert pair.prefill.instance_id == (expected or "p")
    assert pair.alone_because == ("short-prompt" if expected else "")
    if expected:
        assert pair.decode is pair.prefill
        assert pair.cached_tokens == 16 * cached
    avoided = replace(request, or_aggregated=True, avoid=("d", "e"))
    assert index.choose(avoided).prefill.instance_id == "p"


def test_hashes_beyond_the_limit_replace_all_earlier_ones():
    index = PrefixIndex()
    for start in range(0, MAX_HASHES_PER_INSTANCE, 1024):
        held = index.publish("p", pack(range(start, start + 1024)), b"", reset=False)
        assert held == start + 1024
    assert index.publish("p", pack([3, 70_000, 70_001]), b"", reset=False) == 3
    assert depths(index, [2, 3, 70_001]) == {"p": 3}
    assert depths(index, [1, 2]) == {}


def depths(index: PrefixIndex, hashes: list[int], sent: SentPrompts | None = None):
    levels = index.levels(hashes, sent or SentPrompts())
    return index.longest(levels, asked=(), least_loaded=list, takes_part=lambda _: True)


def test_hashes_of_removed_instances_are_dropped_as_others_publish():
    index = PrefixIndex()
    index.publish("p", pack(range(1000)), b"", reset=False)
    index.remove("p")
    assert depths(index, [7]) == {}
    for number in range(10):
        index.publish("q", pack([5000 + number]), b"", reset=False)
    assert not index.levels(range(1000), SentPrompts())
    assert index.publish("p", pack([7]), b"", reset=False) == 1
    assert depths(index, [7]) == {"p": 1}


def test_prompt_counts_from_its_transfer_until_the_second_heartbeat_after_it():
    sent, index = SentPrompts(), PrefixIndex()
    sent.open("t", ["p", "d"], (1, 2))
    sent.open("u", ["p"], (1,))
    for _ in range(3):
        sent.beat("p")
    assert depths(index, [1, 2], sent) == {"p": 2, "d": 2}
    sent.end("t")
    sent.beat("p")
    assert depths(index, [1, 2], sent) == {"p": 2, "d": 2}
    sent.beat("p")
    assert depths(index, [1, 2], sent) == {"p": 1, "d": 2}
    sent.remove("d")
    sent.remove("p")
    assert depths(index, [1, 2], sent) == {}
    sent.end("u")  # already forgotten


def test_transfer_that_is_opened_again_under_its_id_leaves_nothing_behind():
    sent = SentPrompts()
    sent.open("t", ["p"], (1, 2))
    sent.end("t")
    sent.open("t", ["q"], (2, 3))
    assert not sent.holders(1)
    assert set(sent.holders(2)) == {"q"}
    sent.remove("q")
    assert not any(map(sent.holders, (1, 2, 3)))


def test_only_the_newest_of_very_many_prompts_count():
    sent = SentPrompts()
    for number in range(400):
        sent.open(f"t{number}", ["p"], tuple(range(1000 * number, 1000 * number + 256)))
    assert not sent.holders(0)
    assert sent.holders(399_000)


@pytest.mark.parametrize(("publishes", "cached"), [(True, 2000), (False, 0)])
def test_next_request_goes_where_its_prefix_was_sent_if_that_publishes_its_cache(publishes, cached):
    index = PairIndex([busy("p", 0), busy("q", 0), D])
    if publishes:
        index.publish("p", b"", b"", reset=True)
    request = TransferRequest(prefix_hashes=A)
    first = index.choose(request)
    assert first.prefill.instance_id == "p"
    parties = {"prefill": Party.of(first.prefill), "decode": Party.of(first.decode)}
    transfer = Transfer(
        **parties,
        transfer_id="t",
        request_id="r",
        model="m",
        prompt_tokens=None,
        prefill_blocks=0,
        decode_blocks=0,
        created_at=0.0,
        expires_at=1.0,
    )
    index.sent(transfer, A)
    assert index.choose(request).cached_tokens == cached


def test_longest_is_what_the_slow_way_finds_after_any_history(seed):
    source = random.Random(seed)
    index, held = PrefixIndex(), dict[str, list[int]]()
    for _ in range(600):
        name = f"i{source.randrange(90)}"
        added = source.sample(range(40), source.randrange(6))
        removed = source.sample(range(40), source.randrange(4))
        match source.choice(["publish", "publish", "reset", "remove"]):
            case "publish":
                kept = [n for n in held.get(name, []) if n not in added and n not in removed]
                held[name] = kept + added
                count = index.publish(name, pack(added), pack(removed), reset=False)
                assert count == len(held[name])
            case "reset":
                held[name] = added
                index.publish(name, pack(added), b"", reset=True)
            case "remove":
                held.pop(name, None)
                index.remove(name)
        hashes = source.sample(range(40), 10)
        asked = source.sample(sorted(held), min(3, len(held)))
        found = index.longest(
            index.levels(hashes, SentPrompts()),
            asked=asked,
            least_loaded=lambda: iter(held),
            takes_part=lambda _: True,
        )
        depths = {
            name: max(depth for depth in range(1, 11) if hashes[depth - 1] in has)
            for name, has in held.items()
            if not set(hashes).isdisjoint(has)
        }
        assert found.items() <= depths.items()
        assert all(name in found for name in asked if name in depths)
        others = sorted((d for n, d in depths.items() if n not in asked), reverse=True)
        assert (
            sorted((d for n, d in found.items() if n not in asked), reverse=True)[:16]
            == (others[:16])
        )


def test_chain_hashes_name_the_prefix_before_them():
    one, two = chain_hashes([1, 2, 3, 4, 5], 2), chain_hashes([9, 2, 3, 4], 2)
    assert len(one) == 2, "the last token fills no block"
    assert one[0] == chain_hashes([1, 2, 7], 2)[0]
    assert set(one).isdisjoint(two)
    assert set(one).isdisjoint(chain_hashes([1, 2, 3, 4], 2, salt="qwen"))
    assert all(0 <= number < 2**64 for number in one)


def test_cached_blocks_of_a_draining_instance_attract_no_prompt():
    index = PairIndex([busy("p", 0), busy("q", 0), D])
    index.publish("q", pack(A), b"", reset=False)
    index.put(replace(busy("q", 0), state=InstanceState.DRAINING))
    assert index.choose(TransferRequest(prefix_hashes=A)).prefill.instance_id == "p"
