"""vLLM's sleep mode with kvxfer: `--enable-sleep-mode --sleep-mode-backend kvxfer`.

Sleep takes the memory of the KV cache away, into which peers may write, and tells no connector. The
connector that has registered the memory is told here, before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final, Protocol
from weakref import WeakSet

from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

from kvxfer.connectors.vllm.caches import SLEEP_BACKEND

_KV_CACHE: Final = "kv_cache"


class Sleeper(Protocol):
    """A connector whose cache is memory that goes away and comes back."""

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


sleepers: Final[WeakSet[Sleeper]] = WeakSet()
"""Those of this process."""


class KvxferBackend(CuMemBackend):
    """vLLM's own way to sleep, with the cache's registrations closed before it and opened again."""

    def suspend(self, level: int = 1) -> None:
        for sleeper in sleepers:
            sleeper.suspend()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        if tags is None or _KV_CACHE in tags:
            for sleeper in sleepers:
                sleeper.resume()

    def discard(self, tags: Sequence[str]) -> None:
        if _KV_CACHE in tags:
            for sleeper in sleepers:
                sleeper.suspend()
        super().discard(tuple(tags))


with contextlib.suppress(ValueError):  # it is registered
    SleepModeBackendFactory.register_backend(SLEEP_BACKEND, __name__, KvxferBackend.__name__)
