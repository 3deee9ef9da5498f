import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.bench import pattern
from kvxfer.bench.pages import PageDraw, PageLists
from kvxfer.errors import WrongBytes

POOL_BYTES = 4 << 20


@pytest.fixture(scope="module")
def source() -> NDArray[np.uint8]:
    pool = np.zeros(POOL_BYTES, np.uint8)
    pattern.fill(pool)
    return pool


def delivered(source: NDArray[np.uint8], pages: PageLists) -> NDArray[np.uint8]:
    """Returns a destination pool after a faultless transfer."""
    pool = np.zeros(POOL_BYTES, np.uint8)
    pool.reshape(-1, pages.page_bytes)[pages.dst] = source.reshape(-1, pages.page_bytes)[pages.src]
    return pool


def test_all_words_of_a_filled_pool_differ_and_none_is_zero(
    source: NDArray[np.uint8],
) -> None:
    words = source.view(np.uint64)
    assert len(np.unique(words)) == len(words)
    assert words.all()


@pytest.mark.parametrize("page_bytes", [1 << 10, 4 << 10, 256 << 10])
def test_a_faultless_transfer_is_accepted(source: NDArray[np.uint8], page_bytes: int) -> None:
    (pages,) = PageDraw(1, page_bytes, 1 << 20, POOL_BYTES).draw()
    pattern.verify(delivered(source, pages), pages)


@pytest.mark.parametrize("page_bytes", [1 << 10, 4 << 10, 256 << 10])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_single_wrong_bit_is_found_and_its_byte_named(
    source: NDArray[np.uint8], page_bytes: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    (pages,) = PageDraw(seed, page_bytes, 1 << 20, POOL_BYTES).draw()
    pool = delivered(source, pages)
    for _ in range(20):
        index, byte, bit = (int(random.integers(n)) for n in (len(pages.dst), page_bytes, 8))
        place = int(pages.dst[index]) * page_bytes + byte
        pool[place] ^= 1 << bit
        with pytest.raises(
            WrongBytes, match=f"byte {byte} of destination page {pages.dst[index]} "
        ):
            pattern.verify(pool, pages)
        pool[place] ^= 1 << bit


def test_a_page_of_the_wrong_source_is_found(source: NDArray[np.uint8]) -> None:
    (pages,) = PageDraw(5, 4096, 1 << 20, POOL_BYTES).draw()
    swapped = PageLists(pages.page_bytes, np.roll(pages.src, 1), pages.dst)
    with pytest.raises(WrongBytes):
        pattern.verify(delivered(source, swapped), pages)


def test_a_page_that_never_came_is_found_after_a_wipe(source: NDArray[np.uint8]) -> None:
    (pages,) = PageDraw(5, 4096, 1 << 20, POOL_BYTES).draw()
    pool = delivered(source, pages)
    pattern.wipe(pool, PageLists(pages.page_bytes, pages.src[-1:], pages.dst[-1:]))
    with pytest.raises(WrongBytes, match=f"byte 0 of destination page {pages.dst[-1]} "):
        pattern.verify(pool, pages)


def test_a_wiped_pool_is_blank_and_a_stray_byte_in_it_is_found(source: NDArray[np.uint8]) -> None:
    (pages,) = PageDraw(5, 4096, 1 << 20, POOL_BYTES).draw()
    pool = delivered(source, pages)
    pattern.wipe(pool, pages)
    pattern.verify_blank(pool)
    pool[POOL_BYTES - 3] = 1
    with pytest.raises(WrongBytes, match=f"byte {POOL_BYTES - 3} "):
        pattern.verify_blank(pool)
