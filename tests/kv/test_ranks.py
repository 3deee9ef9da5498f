from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvxfer.errors import LayoutMismatch
from kvxfer.kv.ranks import bytes_per_token, layers_between, sources, targets
from kvxfer.layout import KvLayout

BASE = KvLayout(num_layers=4, num_kv_heads=4, head_size=8, dtype="uint8", block_size=4)
MLA = dataclasses.replace(BASE, num_kv_heads=1, mla=True)


def instance(layout: KvLayout, tp: int, pp: int = 1) -> KvLayout:
    return dataclasses.replace(layout, tp_size=tp, pp_size=pp)


@pytest.mark.parametrize(
    ("layout", "prefill", "decode", "by_decode_rank"),
    [
        (BASE, (1, 1), (1, 1), [(0,)]),
        (BASE, (2, 1), (2, 1), [(0,), (1,)]),
        (BASE, (2, 1), (1, 1), [(0, 1)]),
        (BASE, (1, 1), (2, 1), [(0,), (0,)]),
        (BASE, (4, 1), (2, 1), [(0, 1), (2, 3)]),
        # stages: ranks count stage by stage
        (BASE, (1, 2), (1, 1), [(0, 1)]),
        (BASE, (1, 4), (1, 2), [(0, 1), (2, 3)]),
        (BASE, (2, 1), (1, 2), [(0, 1), (0, 1)]),
        (BASE, (1, 2), (2, 1), [(0, 1), (0, 1)]),
        (BASE, (2, 2), (2, 2), [(0,), (1,), (2,), (3,)]),
        # replicated heads: two ranks for each of four
        (BASE, (8, 1), (8, 1), [(rank,) for rank in range(8)]),
        (BASE, (8, 1), (4, 1), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (BASE, (4, 1), (8, 1), [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]),
        (BASE, (8, 1), (1, 1), [tuple(range(8))]),
        # MLA: whole on every rank
        (MLA, (2, 1), (2, 1), [(0,), (1,)]),
        (MLA, (2, 1), (4, 1), [(0,), (0,), (1,), (1,)]),
        (MLA, (4, 1), (1, 1), [(0, 1, 2, 3)]),
        (MLA, (6, 1), (4, 1), [(0, 1), (2,), (3, 4), (5,)]),
    ],
)
def test_each_decode_rank_takes_from_ranks_that_have_its_heads_and_layers(
    layout: KvLayout,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    by_decode_rank: list[tuple[int, ...]],
) -> None:
    ours, theirs = instance(layout, *prefill), instance(layout, *decode)
    found = [sources(ours, theirs.of_rank(rank)) for rank in range(theirs.num_ranks)]
    assert found == by_decode_rank
    for rank in range(ours.num_ranks):
        expected = tuple(at for at, among in enumerate(by_decode_rank) if rank in among)
        assert targets(ours.of_rank(rank), theirs) == expected != ()


def test_replicas_take_turns_by_layer() -> None:
    prefill, decode = instance(MLA, 3), instance(MLA, 1)
    assert [layers_between(prefill.of_rank(rank), decode) for rank in range(3)] == [
        (0, 3),
        (1,),
        (2,),
    ]


def test_a_replica_may_take_part_and_have_no_layer() -> None:
    prefill = dataclasses.replace(instance(MLA, 3), num_layers=2)
    decode = dataclasses.replace(instance(MLA, 1), num_layers=2)
    assert layers_between(prefill.of_rank(2), decode) == ()
    assert sources(prefill, decode) == (0, 1, 2)


def test_block_sizes_with_a_long_cycle_are_refused() -> None:
    prefill, decode = (dataclasses.replace(BASE, block_size=size) for size in (1000, 1001))
    with pytest.raises(LayoutMismatch, match="block_size is 1000 at prefill and 1001 at decode"):
        sources(prefill, decode)
    assert sources(prefill, dataclasses.replace(BASE, block_size=1016)) == (0,)


def test_bytes_per_token_add_up_to_the_whole_model() -> None:
    prefill, decode = instance(BASE, 8, 2), instance(BASE, 2)
    moved = [
        bytes_per_token(prefill.of_rank(source), decode.of_rank(rank))
        for rank in (0, 1)
        for source in sources(prefill, decode.of_rank(rank))
    ]
    assert sum(moved) == 4 * 2 * 4 * 8
    assert min(moved) == max(moved) == sum(moved) // 16


@pytest.mark.parametrize("of", [sources, targets])
def test_another_model_is_refused(of: Any) -> None:
    with pytest.raises(LayoutMismatch, match="num_layers is 4 at prefill and 8 at decode"):
        of(BASE, dataclasses.replace(BASE, num_layers=8))
