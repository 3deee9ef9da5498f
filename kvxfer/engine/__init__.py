"""The transfer engine in Python.

`Engine` is for asyncio programs: submitting, sending and counters may be used from any thread;
everything that is awaited belongs to the event loop in which the engine was entered. `PolledEngine`
is for programs that poll.
"""

from kvxfer.engine.core import EngineHandler
from kvxfer.engine.counter import Counter
from kvxfer.engine.engine import Engine
from kvxfer.engine.memory import Memory, MemoryRegion, alloc_shared
from kvxfer.engine.operation import Operation, Scattered
from kvxfer.engine.operation_group import OperationGroup
from kvxfer.engine.options import EngineOptions, EngineTuning
from kvxfer.engine.peer import Peer
from kvxfer.engine.peer_group import PeerGroup
from kvxfer.engine.polled import PolledEngine
from kvxfer.engine.receive_pool import Received, ReceivePool
from kvxfer.engine.remote_pool import RemotePool
from kvxfer.engine.watcher import CounterMirror, StreamWait, Watcher, WatchFor

__all__ = [
    "Counter",
    "CounterMirror",
    "Engine",
    "EngineHandler",
    "EngineOptions",
    "EngineTuning",
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
    "alloc_shared",
]
