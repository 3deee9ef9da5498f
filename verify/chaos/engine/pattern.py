"""Bytes that identify their place: every page of every transfer differs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Page: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]

_STEP = np.uint64(0x9E3779B97F4A7C15)


def page(seed: int, plane: int, index: int, nbytes: int) -> Page:
    """Returns the bytes of page `index` of a transfer in a plane, as 64-bit words."""
    with np.errstate(over="ignore"):
        start = np.uint64(seed) * np.uint64(1_000_003) + np.uint64(plane * 65_537 + index)
        words = np.arange(nbytes // 8, dtype=np.uint64) + start * _STEP
        return words * _STEP


def reused(block: int, nbytes: int) -> Page:
    """Returns the bytes of a block that another request has."""
    return np.full(nbytes // 8, 0xABABABAB_00000000 + block, dtype=np.uint64)


def wrong_bytes(found: np.ndarray[Any, np.dtype[np.uint64]], expected: Page) -> int:
    """Returns the number of bytes that differ."""
    if np.array_equal(found, expected):
        return 0
    return int((found.view(np.uint8) != expected.view(np.uint8)).sum())
