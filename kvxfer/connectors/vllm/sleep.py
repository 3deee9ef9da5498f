"""vLLM's sleep mode with kvxfer: `--enable-sleep-mode --sleep-mode-backend kvxfer`.

vLLM's sleep releases the memory of the KV cache, into which peers may write, and calls no
connector. This backend calls the connector that has registered the memory, before and after.
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
    """A connector whose cache is in memory that sleep releases and restores."""

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


sleepers: Final[WeakSet[Sleeper]] = WeakSet()
"""The sleepers of this process."""


class KvxferBackend(CuMemBackend):
    """vLLM's own sleep, with the cache's registrations closed before it and opened after it."""

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


with contextlib.suppress(ValueError):  # already registered
    SleepModeBackendFactory.register_backend(SLEEP_BACKEND, __name__, KvxferBackend.__name__)
