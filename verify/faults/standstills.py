"""When the machine ran nobody: what is late then is not a worker's fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_STEP_SECONDS: Final = 0.01
_NOTICED_SECONDS: Final = 0.05


class Standstills:
    """Times in which a thread that has nothing to do but to look at the clock was not run."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._end = threading.Event()

    def within(self, begin: float, end: float) -> float:
        """Seconds of them between two times of time.monotonic()."""
        return sum(max(min(end, to) - max(begin, since), 0.0) for since, to in self._spans)

    @contextmanager
    def watched(self) -> Iterator[Standstills]:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._end.set()
            thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._end.wait(_STEP_SECONDS):
            now = time.monotonic()
            if now - last > _NOTICED_SECONDS:
                self._spans.append((last + _STEP_SECONDS, now))
            last = now
