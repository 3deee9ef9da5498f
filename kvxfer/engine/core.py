"""The common part of all engines: memory, peers, counters, and completions."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from kvxfer.engine.arguments import REFUSALS, Bytes, Gpu, refused, require_callable
from kvxfer.engine.callback import logger, tell
from kvxfer.engine.counter import Counter
from kvxfer.engine.memory import Memory, MemoryRegion, register
from kvxfer.engine.native import error_of, native
from kvxfer.engine.operation import Operation
from kvxfer.engine.options import EngineOptions, native_options
from kvxfer.engine.peer import Peer
from kvxfer.engine.watcher import Watcher
from kvxfer.errors import (
    EngineClosed,
    EngineError,
    InvalidArgument,
    PeerError,
    PeerLost,
    StaleCounter,
)

OperationT = TypeVar("OperationT", bound=Operation)
_Failed = Sequence[tuple[int, str, str]]
NativeCompletion: TypeAlias = tuple[str, int, int, str, str, bytes, str, int, _Failed]
"""A completion from `_native.TransferEngine.drain()`."""


@dataclass(frozen=True, slots=True)
class Nic:
    """A NIC of an engine. network: NICs reach each other if this is equal."""

    name: str
    network: str
    bits_per_second: int


class EngineHandler(Protocol):
    """A handler of peers and messages. Set it as `engine.handler` before any peer connects. It is
    called on the event loop, or within PolledEngine.poll(). It must not block; its errors are
    logged. Messages go only to the handler: Peer.receive() then gets none."""

    def peer_up(self, peer: Peer) -> None:
        """Takes a peer that is connected, whichever side has connected."""

    def message(self, peer: Peer, data: bytes) -> None:
        """Takes a message of `Peer.send()`, in the order in which the peer sent them."""

    def peer_lost(self, peer: Peer, error: EngineError) -> None:
        """Takes the error that ended a connection: a PeerError, or EngineClosed if this engine was
        closed. No write of the peer lands any more. It is the last call for the peer."""


class EngineCore(ABC):
    """A native engine, and the Python objects that its completions are for."""

    def __init__(self, cluster_key: bytes | str, options: EngineOptions, *, thread: bool) -> None:
        self.name = options.get("name", "")
        try:
            self.native = native.TransferEngine(
                native.EngineOptions(
                    cluster_key=cluster_key, thread=thread, **native_options(options)
                )
            )
        except native.Error as error:
            raise error_of(*error.args) from None
        self._process = os.getpid()
        self.handler: EngineHandler | None = None
        self._closed = False
        self._peers: dict[int, Peer] = {}
        self._to_accept: dict[int, Peer] = {}
        self._counters: dict[int, Counter] = {}
        self._revoking: dict[int, Callable[[], object]] = {}
        self._regions: set[MemoryRegion] = set()
        self._on_close: list[Callable[[], object]] = []
        # Operations are submitted from any thread and completed on the loop.
        self._lock = threading.Lock()
        self._operations: dict[int, Operation] = {}
        self._finished_early: dict[int, tuple[Exception | None, _Failed]] = {}

    def on_close(self, callback: Callable[[], object]) -> None:
        """Calls back at the end of close(), with no peer left. Event loop only."""
        require_callable("callback", callback)
        self._on_close.append(callback)

    def forget_on_close(self, callback: Callable[[], object]) -> None:
        """Removes a callback of on_close()."""
        require_callable("callback", callback)
        if callback in self._on_close:
            self._on_close.remove(callback)

    @property
    def address(self) -> str:
        """The address for the peers' connect(): kvx://HOST:PORT/ENGINE_ID."""
        return self.native.address

    @property
    def engine_id(self) -> str:
        """The id of the engine: 32 hex digits, random at every start."""
        return self.native.engine_id

    @property
    def fabrics(self) -> tuple[str, ...]:
        """The fabrics in use, the preferred first."""
        return tuple(self.native.fabrics)

    @property
    def nics(self) -> list[Nic]:
        """The NICs in use; the position is the number that pins a write to one."""
        return [Nic(*each) for each in self.native.nics]

    @property
    def peers(self) -> list[Peer]:
        """The connected peers."""
        return list(self._peers.values())

    def stats(self) -> dict[str, int]:
        """Returns totals since the start: bytes and writes sent, received, refused; bytes sent from
        a GPU through host memory (bytes_staged, a part of bytes_sent); refused handshakes; peers
        that were disconnected; and the number of connected peers."""
        return self.native.stats()

    def refusals(self) -> dict[str, dict[str, int]]:
        """Returns the number of refusals since the start, by kind and error code: "handshake"
        (connections that were not accepted), "peer" (peers that were disconnected for what they
        did) and "write" (writes of peers)."""
        return self.native.refusals()

    @property
    def _is_parents(self) -> bool:
        """Whether this process was forked from the engine's: close() then does nothing."""
        return os.getpid() != self._process

    def _forget_all(self) -> None:
        """Ends all waits, as nothing comes any more."""
        for counter in list(self._counters.values()):
            counter._resolve(EngineClosed("the engine was closed"), 0)
        for callback in list(self._on_close):
            tell(callback)
        self._regions.clear()

    # --- memory and counters

    def alloc(self, nbytes: Bytes, gpu: Gpu | None = None, *, require_nics: bool = False) -> Memory:
        """Allocates zeroed memory that peers on this host can map; the fastest source.

        gpu: CUDA's number, in this process, of the GPU whose memory it is; None for host memory.
        require_nics: see register().

        Raises OutOfMemory, EngineClosed; for a GPU, FabricUnavailable if there is no CUDA driver,
        InvalidArgument if there is no such GPU, and GpuLost.
        """
        try:
            handle = self.native.allocate(nbytes, gpu, require_nics)
        except REFUSALS as error:
            raise refused(error, EngineCore.alloc, locals()) from None
        return Memory(MemoryRegion(self.native, handle))

    def register(
        self,
        target: Any,
        nbytes: Bytes | None = None,
        *,
        owner: object = None,
        require_nics: bool = False,
    ) -> MemoryRegion:
        """Registers the caller's memory: a numpy array, a torch tensor on the CPU or a CUDA GPU, a
        writable buffer, an object with `__cuda_array_interface__` or DLPack on a CUDA GPU, or an
        address with `nbytes`. It must be contiguous, and stay valid until close().

        owner: for an address, the object that keeps the memory; it lives until close().
        require_nics: raises FabricUnavailable, with the reason, if one of this engine's NICs does
        not reach the memory itself or there is no NIC; NicLost if all are down. Without it, such
        memory uses other NICs or tcp; a notice says so once, `MemoryRegion.nics` at any time. tcp
        still takes over if no path of a NIC is left, or the other end's memory needs it.

        CUDA's driver says whether an address is memory of a GPU: `MemoryRegion.gpu`. Raises
        InvalidArgument, OutOfBounds if memory of a GPU is smaller than was passed, EngineClosed,
        and GpuLost.
        """
        try:
            region = register(
                self.native, target, nbytes, owner, require_nics, on_close=self._regions.discard
            )
        except REFUSALS as error:
            raise refused(error, EngineCore.register, locals()) from None
        self._regions.add(region)  # peers may write into it until it is closed: its owner must live
        return region

    def counter(self, writer: Peer | None = None) -> Counter:
        """Returns a new counter at zero. Raises OutOfMemory while 65,536 are in use.

        writer: the only peer that will be told of it, so that release() waits for no other.
        """
        try:
            if writer is not None and writer.engine is not self:
                raise InvalidArgument(f"writer is {writer!r}, a peer of another engine")
            imm = self.native.allocate_counter(None if writer is None else writer.id)
        except REFUSALS as error:
            raise refused(error, EngineCore.counter, locals()) from None
        counter = self._counters[imm] = Counter(
            self.native, imm, self._counter_released, self._counter_revoked
        )
        return counter

    def _counter_released(self, imm: int) -> None:
        counter = self._counters.pop(imm, None)
        if counter is not None:
            self._end_wait(counter, StaleCounter(f"counter {imm} was released"))

    @abstractmethod
    def _end_wait(self, counter: Counter, error: Exception) -> None:
        """Ends the wait of the task that waits for the counter, if any. Any thread."""

    def _counter_revoked(self, imm: int, then: Callable[[], object] | None) -> None:
        """Keeps the callback until the writers have answered; None removes it."""
        if then is None:
            del self._revoking[imm]
        else:
            self._revoking[imm] = then

    def watcher(self, *, gpu: Gpu | None = None) -> Watcher:
        """Returns a new word at zero that holds writes back until compute has added to it: the
        processor, or with `gpu` streams of that GPU through `Watcher.add_on()`. Raises
        InvalidArgument if there is no such GPU."""
        if gpu is None:
            return Watcher(self.native)
        try:
            return Watcher(self.native, self.native.stream_word(gpu))
        except REFUSALS as error:
            raise refused(error, EngineCore.watcher, locals()) from None

    # --- operations

    def _track(self, operation: OperationT) -> OperationT:
        """Registers an accepted operation, so that it learns of its end. Any thread."""
        with self._lock:
            early = self._finished_early.pop(operation.id, None)
            if early is None:
                self._operations[operation.id] = operation
        if early is not None:
            operation._finish(*early)
        return operation

    # --- completions

    def _drain(self) -> None:
        self._take(self.native.drain())

    def _take(self, completions: Sequence[NativeCompletion]) -> None:
        for completion in completions:
            kind, ident, peer_id, code, text, data, fabric, timestamp_ns, failed = completion
            error = None if code == "ok" else error_of(code, text)
            match kind:
                case "write":
                    self._finish(ident, error, failed)
                case "counter":
                    counter = self._counters.get(ident)
                    if counter is not None:
                        counter._resolve(error, timestamp_ns)
                case "arrival":
                    counter = self._counters.get(ident)
                    if counter is not None:
                        counter._arrived()
                case "released":
                    tell(self._revoking.pop(ident))
                case "message":
                    self._deliver(peer_id, data)
                case "peer_up":
                    peer = Peer(self, peer_id, data.decode(), text, fabric)
                    self._peer_up(peer, accepted=bool(ident))
                case "peer_down":
                    self._peer_down(peer_id, error)
                case "connect":
                    self._connect_ended(ident, peer_id, error)
                case "notice":
                    logger.warning("%s", text)

    @abstractmethod
    def _connect_ended(self, ident: int, peer_id: int, error: Exception | None) -> None:
        """Takes the native engine's report of a connect()."""

    def _finish(self, ident: int, error: Exception | None, failed: _Failed) -> None:
        with self._lock:
            operation = self._operations.pop(ident, None)
            if operation is None:  # the submit() has not returned yet
                self._finished_early[ident] = (error, failed)
                return
        operation._finish(error, failed)

    def _deliver(self, peer_id: int, data: bytes) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        if self.handler is None:
            peer._deliver(data)
        else:
            tell(self.handler.message, peer, data)

    def _peer_up(self, peer: Peer, *, accepted: bool) -> None:
        self._peers[peer.id] = peer
        if accepted:
            self._to_accept[peer.id] = peer
        if self.handler is not None:
            tell(self.handler.peer_up, peer)

    def _peer_down(self, peer_id: int, error: Exception | None) -> None:
        peer = self._peers.pop(peer_id, None)
        self._to_accept.pop(peer_id, None)
        if peer is None:
            return
        reason = error if isinstance(error, PeerError | EngineClosed) else PeerLost(str(error))
        peer._lose(reason)
        if self.handler is not None:
            tell(self.handler.peer_lost, peer, reason)
