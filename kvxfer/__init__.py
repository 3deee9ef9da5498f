"""Moves KV caches, weight updates and tokens of MoE layers between machines by one-sided writes.

An engine and its objects:

    Engine, EngineOptions, EngineHandler    for asyncio programs; its options; a handler of events
    EngineTuning                            options that few programs set
    PolledEngine                            for programs that poll
    Peer, PeerGroup                         connected engines
    Memory, MemoryRegion, alloc_shared      memory to write from and into
    Operation, OperationGroup, Scattered    writes under way
    Counter, CounterMirror, StreamWait      counts of arrivals, also for GPU streams and kernels
    Watcher, WatchFor                       writes that wait until their bytes are computed
    ReceivePool, Received, RemotePool       messages into registered slots

    KvxferError                             the base of all errors

On top of the engine:

    kvxfer.kv        KV caches: layouts, block pools, the two sessions of a transfer
    kvxfer.weights   weight updates
    kvxfer.moe       dispatch and combine of mixture-of-experts models
    kvxfer.client    the control plane: registering instances, reserving pairs
    kvxfer.errors    every error

docs/python-api.md begins with an example.
"""

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
        EngineTuning,
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
    "EngineTuning",
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
    # Imported on first use, so that a program that only needs the errors imports nothing else.
    if name == "KvxferError":
        from kvxfer.errors import KvxferError

        return KvxferError
    if name in __all__:
        from kvxfer import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
