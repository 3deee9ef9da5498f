import numpy as np
import pytest

from kvxfer.bench.pages import PageDraw, PageLists
from kvxfer.errors import InvalidArgument


def lists(src: list[int], dst: list[int]) -> PageLists:
    return PageLists(4096, np.array(src), np.array(dst))


@pytest.mark.parametrize(
    ("src", "dst", "contiguous"),
    [
        ([0, 1], [7, 8], 1),
        ([1, 0], [8, 7], 1),
        ([0, 1], [8, 7], 0),
        ([0, 2], [7, 8], 0),
        ([4, 9, 5, 6], [1, 0, 2, 3], 2),
        ([3], [3], 0),
    ],
)
def test_pages_that_follow_each_other_on_both_sides_are_counted_in_any_order(
    src: list[int], dst: list[int], contiguous: int
) -> None:
    assert lists(src, dst).contiguous == contiguous


def test_both_processes_draw_the_same_pages() -> None:
    draw = PageDraw(7, 4096, 1 << 16, 1 << 20, requests=3)
    for one, other in zip(draw.draw(), draw.draw(), strict=True):
        np.testing.assert_array_equal(one.src, other.src)
        np.testing.assert_array_equal(one.dst, other.dst)


def test_each_round_and_each_seed_draws_other_pages() -> None:
    draw = PageDraw(7, 4096, 1 << 18, 1 << 22)
    others = (draw.of_round(1), PageDraw(8, 4096, 1 << 18, 1 << 22))
    for other in others:
        assert not np.array_equal(draw.draw()[0].dst, other.draw()[0].dst)


@pytest.mark.parametrize("page_bytes", [1 << 10, 4 << 10, 64 << 10])
def test_a_sweep_uses_every_page_of_both_pools_once_and_nothing_can_be_coalesced(
    page_bytes: int,
) -> None:
    pool_bytes = 4 << 20
    requests = PageDraw(3, page_bytes, 1 << 20, pool_bytes, requests=4).draw()
    every_page = np.arange(pool_bytes // page_bytes)
    np.testing.assert_array_equal(np.sort(np.concatenate([r.src for r in requests])), every_page)
    np.testing.assert_array_equal(np.sort(np.concatenate([r.dst for r in requests])), every_page)
    assert [request.nbytes for request in requests] == [1 << 20] * 4
    assert sum(request.contiguous for request in requests) == 0


def test_requests_that_do_not_fit_the_pools_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="do not fit"):
        PageDraw(1, 4096, 1 << 20, 1 << 20, requests=2).draw()
