from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgument
from kvxfer.moe.placement import NO_REPLICA, Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Draws any placement: each expert on one rank or more, in any order."""
    ranks = draw(st.integers(1, 9))
    experts: list[list[int]] = [[] for _ in range(ranks)]
    for expert in range(draw(st.integers(1, 24))):
        for owner in draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks)):
            experts[owner].append(expert)
    return Placement(tuple(tuple(draw(st.permutations(each))) for each in experts))


@st.composite
def views(draw: st.DrawFn, placement: Placement) -> tuple[list[bool], list[set[int]]]:
    """Draws the live ranks, and for each rank the ranks on its host."""
    ranks = range(len(placement.ranks))
    alive = draw(st.lists(st.booleans(), min_size=len(ranks), max_size=len(ranks)))
    hosts = [draw(st.integers(0, 2)) for _ in ranks]
    return alive, [{other for other in ranks if hosts[other] == hosts[rank]} for rank in ranks]


@given(st.data())
def test_a_table_names_the_nearest_live_replica_of_each_expert(data: st.DataObject) -> None:
    placement = data.draw(placements())
    alive, near = data.draw(views(placement))
    for rank in range(len(placement.ranks)):
        table = placement.table(alive, rank, near[rank])
        assert len(table) == placement.experts
        for expert, entry in enumerate(table.tolist()):
            owners = {
                owner
                for owner, experts in enumerate(placement.ranks)
                if alive[owner] and expert in experts
            }
            if not owners:
                assert entry == NO_REPLICA
                continue
            owner, local = entry >> 32, entry & 0xFFFFFFFF
            assert owner in owners
            assert placement.ranks[owner][local] == expert
            if rank in owners:
                assert owner == rank
            elif owners & near[rank]:
                assert owner in near[rank]


@given(st.data())
def test_ranks_without_a_replica_take_turns(data: st.DataObject) -> None:
    placement = data.draw(placements())
    alive, _ = data.draw(views(placement))
    senders = [rank for rank, lives in enumerate(alive) if lives]
    tables = {rank: placement.table(alive, rank).tolist() for rank in senders}
    for expert in range(placement.experts):
        owners = [rank for rank in senders if expert in placement.ranks[rank]]
        if not owners:
            continue
        sent = [tables[rank][expert] >> 32 for rank in senders if rank not in owners]
        loads = [sent.count(owner) for owner in owners]
        assert max(loads) - min(loads) <= 1


@given(st.integers(1, 300), st.integers(1, 16), st.data())
def test_even_placement_gives_each_rank_its_share(
    experts: int, ranks: int, data: st.DataObject
) -> None:
    copies = data.draw(st.integers(1, ranks))
    placement = Placement.even(experts, ranks, copies)
    assert placement.experts == experts
    owned = [len(each) for each in placement.ranks]
    assert sum(owned) == experts * copies
    assert max(owned) - min(owned) <= copies
    for expert in range(experts):
        assert sum(expert in each for each in placement.ranks) == copies


def test_any_rank_may_die_if_experts_have_two_copies() -> None:
    placement = Placement.even(64, 8, copies=2)
    for dead in range(8):
        alive = [rank != dead for rank in range(8)]
        for rank in range(8):
            assert (placement.table(alive, rank) != NO_REPLICA).all()


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((), "0 ranks"),
        (((), ()), "no rank has expert 0"),
        (((0, 2),), "no rank has expert 1"),
        (((0, -1),), "no rank has expert 1"),
        (((0, 1), (1, 1)), "rank 1 has an expert twice"),
    ],
)
def test_an_invalid_placement_is_refused(ranks: tuple[tuple[int, ...], ...], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Placement(ranks)
