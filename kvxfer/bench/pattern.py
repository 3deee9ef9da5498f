"""The content of the pools: every 8-byte word of a source pool names its place, so that a byte that
is wrong, missing, shifted or from another page shows in the destination."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvxfer.bench.pages import PageLists
from kvxfer.errors import WrongBytes

WORD_BYTES = 8
# Odd, so that no two words of a pool are alike and none is zero; the fraction of the golden ratio.
_MIX = np.uint64(0x9E3779B97F4A7C15)
# Verification works in steps that stay in the second-level cache.
_STEP_BYTES = 1 << 19


def fill(pool: NDArray[np.uint8]) -> None:
    """Writes the pattern: word w becomes (w + 1) * _MIX modulo 2**64."""
    words = pool.view(np.uint64)
    step = _STEP_BYTES // WORD_BYTES
    ramp = np.arange(1, step + 1, dtype=np.uint64) * _MIX
    for start in range(0, len(words), step):
        part = words[start : start + step]
        np.add(ramp[: len(part)], np.array(start, dtype=np.uint64)[None] * _MIX, out=part)


def verify(pool: NDArray[np.uint8], pages: PageLists) -> None:
    """Checks that every destination page holds its source page's pattern.

    Raises WrongBytes naming the first byte that does not.
    """
    page_words = pages.page_bytes // WORD_BYTES
    pool_pages = pool.view(np.uint64).reshape(-1, page_words)
    ramp = np.arange(page_words, dtype=np.uint64) * _MIX
    first_words = (pages.src.astype(np.uint64) * np.uint64(page_words) + np.uint64(1)) * _MIX
    step = max(1, _STEP_BYTES // pages.page_bytes)
    for start in range(0, len(pages.dst), step):
        got = pool_pages[pages.dst[start : start + step]]
        expected_first = first_words[start : start + step, None]
        got -= expected_first
        if (got != ramp).any():
            row = int(np.flatnonzero((got != ramp).any(axis=1))[0])
            wrong = (got[row] + expected_first[row]) ^ (ramp + expected_first[row])
            byte = int(np.flatnonzero(wrong.view(np.uint8))[0])
            raise WrongBytes(
                f"byte {byte} of destination page {pages.dst[start + row]} is "
                f"not that of source page {pages.src[start + row]} "
                f"({pages.page_bytes}-byte pages, page {start + row} of the request)"
            )


def wipe(pool: NDArray[np.uint8], pages: PageLists) -> None:
    """Zeroes the destination pages, so that no later request finds its bytes already there."""
    pool.reshape(-1, pages.page_bytes)[pages.dst] = 0


def verify_blank(pool: NDArray[np.uint8]) -> None:
    """Checks that the whole pool is zero: nothing landed outside the pages that were wiped.

    Raises WrongBytes naming the first byte that is not.
    """
    step = _STEP_BYTES
    for start in range(0, len(pool), step):
        part = pool[start : start + step]
        if part.view(np.uint64).any():
            raise WrongBytes(
                f"byte {start + int(np.flatnonzero(part)[0])} of the destination pool was "
                "written, but no page of the request is there"
            )
