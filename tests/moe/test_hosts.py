"""The grouping of ranks by host, from the ranks that each has added."""

from __future__ import annotations

from kvxfer.moe.hosts import hosts_of


def near(*ranks: int) -> frozenset[int]:
    return frozenset(ranks)


def test_ranks_that_have_all_added_each_other_share_a_host() -> None:
    said = {0: near(0, 2), 1: near(1, 3), 2: near(0, 2), 3: near(1, 3)}
    assert hosts_of(4, said) == [0, 1, 0, 1]


def test_a_rank_that_has_said_nothing_is_alone() -> None:
    assert hosts_of(3, {}) == [0, 1, 2]
    assert hosts_of(3, {0: near(0, 1, 2), 2: near(0, 1, 2)}) == [0, 1, 0]


def test_ranks_that_do_not_agree_are_apart() -> None:
    # 1 has added both others, which have not added each other.
    assert hosts_of(3, {0: near(0, 1), 1: near(0, 1, 2), 2: near(1, 2)}) == [0, 1, 2]
