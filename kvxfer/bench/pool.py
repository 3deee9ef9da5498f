"""Memory that the benchmark itself allocates."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 << 20


def anonymous_pool(nbytes: int) -> NDArray[np.uint8]:
    """Returns private anonymous memory of `nbytes`, zeroed and present, on huge pages if the system
    gives them on request (MADV_HUGEPAGE). Freed with the array's last reference."""
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    pool = whole[start : start + nbytes]
    pool[:] = 0
    return pool
