"""kvxfer: moves KV caches between prefill and decode workers of LLM inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.version import __version__

if TYPE_CHECKING:
    from kvxfer.engine import (
        Counter,
        CounterMirror,
        Engine,
        EngineHandler,
        EngineOptions,
        Memory,
        MemoryRegion,
        Operation,
        OperationGroup,
        Peer,
        PeerGroup,
        PolledEngine,
        Received,
        ReceivePool,
        RemotePool,
        Scattered,
        StreamWait,
        Watcher,
        WatchFor,
        alloc_shared,
    )
    from kvxfer.errors import KvxferError

__all__ = [
    "Counter",
    "CounterMirror",
    "Engine",
    "EngineHandler",
    "EngineOptions",
    "KvxferError",
    "Memory",
    "MemoryRegion",
    "Operation",
    "OperationGroup",
    "Peer",
    "PeerGroup",
    "PolledEngine",
    "ReceivePool",
    "Received",
    "RemotePool",
    "Scattered",
    "StreamWait",
    "WatchFor",
    "Watcher",
    "__version__",
    "alloc_shared",
]


def __getattr__(name: str) -> Any:
    # Lazily, so that `import kvxfer` costs nothing to a program that only wants the errors.
    if name == "KvxferError":
        from kvxfer.errors import KvxferError

        return KvxferError
    if name in __all__:
        from kvxfer import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
