"""The engine of a simulated process: kvxfer._native's interface over a simulated network.

The Python part, kvxfer.engine, is real.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvxfer.engine.native import native as compiled

from .contents import Array
from .engine import EVENT_FD, End, EngineState
from .network import Network
from .oracle import Oracle
from .process import Process
from .writes import PostedOperation, Write, runs


class Region:
    """Registered memory, and its handle."""

    gpu = None

    def __init__(self, data: Array, descriptor: bytes) -> None:
        self.data = data
        self.descriptor = descriptor

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    def checksum(self, offsets: Any, numbers: Any, length: int) -> int:
        """Returns a checksum with the same properties as the compiled function's."""
        total = 0
        for offset, number in zip(offsets.tolist(), numbers.tolist(), strict=True):
            run = self.data[offset : offset + length].tobytes()
            digest = hashlib.blake2b(run, digest_size=8, salt=number.to_bytes(16, "little"))
            total += int.from_bytes(digest.digest(), "little")
        return total % (1 << 64)


class Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    """kvxfer.engine.Memory over a Region."""

    region: Any

    def __new__(cls, region: Any) -> Memory:
        memory: Memory = region.handle.data.view(cls)
        memory.region = region
        return memory

    def __array_finalize__(self, obj: Any) -> None:
        self.region = getattr(obj, "region", None)

    def close(self) -> None:
        self.region.close()


class NativeEngine(EngineState):
    """A TransferEngine whose completions have simulated times."""

    event_fd = EVENT_FD
    fabrics = ("simulated",)

    def __init__(self, network: Network, oracle: Oracle, process: Process) -> None:
        super().__init__(network.world, process)
        self._network, self._oracle = network, oracle
        self.address = process.address
        self.operations: dict[int, PostedOperation] = {}
        network.engines[process] = self

    # --- memory and counters

    def allocate(self, nbytes: int, gpu: int | None, require_nics: bool) -> Region:
        assert gpu is None, "there are no GPUs here"
        assert not require_nics, "there are no NICs here"
        return Region(np.zeros(nbytes, np.uint8), self.new_name())

    def deregister(self, region: Region) -> None:
        pass

    def allocate_counter(self, writer: int | None) -> int:
        return self.counters.allocate(writer)

    def grant(self, imm: int, ranges: Any) -> list[bytes]:
        return self.counters.grant(imm, ranges)

    def counter_value(self, imm: int) -> int:
        return self.counters.value(imm)

    def expect(self, imm: int, total: int, *, at_least: bool) -> None:
        self.counters.expect(imm, total, at_least)

    def release_counter(self, imm: int) -> None:
        self.counters.release(imm, wait=True)

    def begin_release_counter(self, imm: int) -> bool:
        return self.counters.release(imm)

    # --- peers

    def connect(self, address: str, timeout: float) -> int:
        ident = self.new_id()
        self._network.dial(self, address, ident, timeout)
        return ident

    def disconnect(self, peer: int) -> None:
        if peer in self.ends:
            self.ends[peer].lose("peer-lost", "this engine disconnected")

    def fence(self, peer: int) -> None:
        self._end(peer).lose("peer-lost", "this engine fenced the peer off")

    def send(self, peer: int, data: bytes) -> None:
        self._end(peer).send(data)

    # --- writes

    def write_pages(
        self, peer: int, source: Region, destination: bytes, *, page_length: int,
        source_pages: Any, destination_pages: Any, source_stride: int, destination_stride: int,
        source_offset: int, destination_offset: int, imm: int | None, timeout: float,
        after: None = None, **_: object,
    ) -> tuple[int, int, int, int]:  # fmt: skip
        assert after is None, "there are no watched words here"
        end = self._end(peer)
        queued = sum(len(operation.unread) for operation in end.operations.values())
        if queued >= self.world.max_queued:
            self.world.count("backpressure")
            raise compiled.Error("backpressure", f"{queued} groups of writes are queued")
        operation = PostedOperation(end, self._oracle, self.new_id(), imm or 0, timeout)
        writes = []
        for begin, to, length in runs(
            source_pages * source_stride + source_offset,
            destination_pages * destination_stride + destination_offset,
            page_length,
        ):
            data = source.data[begin : begin + length]
            transfer = self._oracle.posts(self.process, data)
            writes.append(Write(data, destination, to, transfer))
        self.operations[operation.id] = operation
        operation.post(writes)
        nbytes = len(source_pages) * page_length
        return operation.id, len(writes), len(operation.groups), nbytes

    def cancel(self, operation: int) -> None:
        posted = self.operations.get(operation)
        if posted is not None:
            self.world.clock.after(
                self.world.latency(),
                lambda: posted.fail("cancelled", "cancelled by the caller"),
                self.process,
            )

    def _end(self, peer: int) -> End:
        end = self.ends.get(peer)
        if end is None or end.state != "up":
            raise compiled.Error("peer-lost", f"peer {peer} is not connected")
        return end


def module(engine_of: Any) -> SimpleNamespace:
    """Returns the parts of kvxfer._native that kvxfer.engine.core needs."""
    return SimpleNamespace(
        EngineOptions=lambda **options: SimpleNamespace(**options), TransferEngine=engine_of
    )
