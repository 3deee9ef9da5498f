"""The cores of processes that are started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Restricts this thread, and the processes that it starts, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def split_cores() -> tuple[set[int], set[int]]:
    """Returns the last core, and the others; the same core twice if there is only one."""
    cores = os.sched_getaffinity(0)
    last = {max(cores)}
    return last, cores - last or cores
