"""The native engine. Use it through `kvxfer.Engine`; this is its exact interface."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer, CapsuleType

MAX_MESSAGE_BYTES: int
DESCRIPTOR_BYTES: int
MIN_CLUSTER_KEY_BYTES: int
BUILT_FABRICS: tuple[str, ...]
ENGINE_OPTIONS: dict[str, tuple[Any, float | None, float | None, str]]
"""The default, the least, the most and the unit of each option, by name. Those of tuning are called
"tuning.NAME"; most is infinity if there is no upper bound, and both are None if there are none."""

class Error(Exception):
    """args: (code, message); `kvxfer.errors.by_code` has the public class."""

_Integers: TypeAlias = Sequence[int] | Buffer | np.ndarray[Any, Any] | _SupportsArray
"""One dimension: a sequence, a buffer of any type of integer, or an object with `__array__`."""

_Readable: TypeAlias = Buffer | np.ndarray[Any, Any]
_Writable: TypeAlias = Buffer | np.ndarray[Any, Any]
"""A contiguous buffer. numpy declares its arrays as buffers only from Python 3.12 on."""

class _SupportsArray(Protocol):
    """An object that converts to an array, such as a tensor."""

    def __array__(self) -> NDArray[Any]: ...

class _Bound(type):
    """pybind11's metaclass."""

class NicFactory(metaclass=_Bound):
    """NICs beside those of the host."""

def end_unused_gpus() -> None:
    """Frees the GPU resources that are kept for the next engine. Waits for all streams."""

def null_nics(*, keeps_order: bool) -> NicFactory:
    """Returns a network of NICs that move nothing; each engine made with it has one NIC."""

class EngineOptions(metaclass=_Bound):
    """The options of `kvxfer.EngineOptions`, and a `cluster_key`. Instead of `fabrics` there are
    the flags `local` and `tcp`, and `verbs` and `ofi`: "never", "if_available" or "required".
    `tuning` is a dict, and `more_nics` a NicFactory."""

    def __init__(self, **options: object) -> None:
        """Takes those of ENGINE_OPTIONS."""

class SharedMemory(Buffer):
    """Zeroed host memory that peers on this host can map; a writable buffer of bytes."""

    def __init__(self, nbytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class MemoryRegion(Buffer):
    """Registered memory; a writable buffer of bytes if it is host memory."""

    def __init__(self, region: MemoryRegion) -> None:
        """Makes another handle of the same region."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def gpu(self) -> int | None:
        """The GPU of the memory, by CUDA's number in this process; None for host memory."""
    @property
    def nics(self) -> tuple[str | None, ...]: ...
    @property
    def shareable(self) -> bool: ...
    @property
    def descriptor(self) -> bytes: ...
    def read(self, into: _Writable, offset: int = 0) -> None: ...
    def write(self, data: _Readable, offset: int = 0) -> None: ...
    def checksum(self, offsets: _Integers, numbers: _Integers, length: int) -> int: ...
    def __dlpack__(
        self,
        *,
        stream: object = ...,
        max_version: tuple[int, int] | None = ...,
        dl_device: tuple[int, int] | None = ...,
        copy: bool | None = ...,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class WatchWord(metaclass=_Bound):
    """A 64-bit word of host memory, initially zero. Compute adds to it at `address`."""

    def __init__(self) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def value(self) -> int: ...
    def add(self, by: int = 1) -> int: ...

class StreamWord(metaclass=_Bound):
    """A watch word that streams of a GPU count up."""

    @property
    def word(self) -> WatchWord: ...
    def add_on(self, stream: int, by: int) -> None: ...

class StreamWait(metaclass=_Bound):
    def reached(self) -> bool:
        """Returns False while the stream waits. Raises the error that ended the wait."""
    @property
    def address(self) -> int: ...

class CounterMirror(metaclass=_Bound):
    @property
    def value(self) -> int: ...
    @property
    def address(self) -> int: ...

class TransferEngine(metaclass=_Bound):
    """The transfer engine. Any thread may call any method. Methods that submit writes return
    (operation id, writes, immediates, bytes)."""

    def __init__(self, options: EngineOptions) -> None: ...
    def close(self) -> None: ...
    def poll(self) -> bool:
        """Does the pending work of an engine without a thread. Returns whether anything moved."""
    @property
    def address(self) -> str: ...
    @property
    def engine_id(self) -> str: ...
    @property
    def fabrics(self) -> list[str]: ...
    @property
    def nics(self) -> list[tuple[str, str, int]]: ...
    @property
    def event_fd(self) -> int: ...
    def drain(
        self,
    ) -> list[tuple[str, int, int, str, str, bytes, str, int, list[tuple[int, str, str]]]]:
        """Returns completions: (kind, id, peer, code, text, data, fabric, CLOCK_MONOTONIC ns,
        failed).

        id: the operation's; for counter, arrival and released the immediate; for peer_up 1 if the
        peer connected, 0 if this engine did. failed: the parts of a write that failed, as
        (part, code, text).
        """

    def stats(self) -> dict[str, int]: ...
    def refusals(self) -> dict[str, dict[str, int]]: ...
    def allocate(self, nbytes: int, gpu: int | None, require_nics: bool = ...) -> MemoryRegion: ...
    def register_memory(
        self, address: int, nbytes: int, require_nics: bool = ...
    ) -> MemoryRegion: ...
    def deregister(self, region: MemoryRegion) -> None: ...
    def connect(self, address: str, timeout: float) -> int: ...
    def disconnect(self, peer: int) -> None: ...
    def fence(self, peer: int) -> None: ...
    def send(self, peer: int, data: bytes) -> None: ...
    def write(
        self,
        peer: int,
        source: MemoryRegion,
        destination: bytes,
        *,
        source_offset: int,
        destination_offset: int,
        length: int,
        imm: int | None,
        timeout: float | None,
        nic: int | None,
        after: tuple[WatchWord, int] | None,
    ) -> tuple[int, int, int, int]: ...
    def write_pages(
        self,
        peer: int,
        source: MemoryRegion,
        destination: bytes,
        *,
        page_length: int,
        source_pages: _Integers,
        destination_pages: _Integers,
        source_stride: int,
        destination_stride: int,
        source_offset: int,
        destination_offset: int,
        imm: int | None,
        timeout: float | None,
        nic: int | None,
        after: tuple[WatchWord, int] | None,
    ) -> tuple[int, int, int, int]: ...
    def write_list(
        self,
        peer: int,
        sources: Sequence[MemoryRegion],
        destinations: Sequence[bytes],
        *,
        source_offsets: _Integers,
        destination_offsets: _Integers,
        lengths: _Integers,
        imm: int | None,
        timeout: float | None,
        nic: int | None,
        after: tuple[WatchWord, int] | None,
    ) -> tuple[int, int, int, int]: ...
    def write_imm(
        self,
        peer: int,
        imm: int,
        *,
        timeout: float | None,
        nic: int | None,
        after: tuple[WatchWord, int] | None,
    ) -> tuple[int, int, int, int]: ...
    def scatter(
        self,
        source: MemoryRegion,
        peers: Sequence[int],
        destinations: Sequence[bytes],
        *,
        source_offsets: _Integers,
        destination_offsets: _Integers,
        lengths: _Integers,
        imm: int | None,
        timeout: float | None,
        after: tuple[WatchWord, int] | None,
    ) -> tuple[int, int, list[int], int]: ...
    def time_scatter(
        self,
        source: MemoryRegion,
        peers: list[int],
        destinations: list[bytes],
        length: int,
        imm: int,
    ) -> tuple[int, int]:
        """Returns the operation's id, and the nanoseconds that scatter() took in native code. Each
        peer gets its `length` bytes of the source, one part after the other."""

    def barrier(
        self,
        peers: Sequence[int],
        imm: int,
        *,
        timeout: float | None,
        after: tuple[WatchWord, int] | None,
    ) -> tuple[int, int, list[int], int]: ...
    def wake(self) -> None:
        """Checks the watched words now."""
    def stream_word(self, gpu: int) -> StreamWord: ...
    def mirror_counter(self, gpu: int, imm: int) -> CounterMirror: ...
    def wait_on_stream(
        self, gpu: int, stream: int, imm: int, total: int, *, timeout: float | None, at_least: bool
    ) -> StreamWait: ...
    def cancel(self, operation: int) -> None: ...
    def allocate_counter(self, writer: int | None) -> int: ...
    def grant(self, imm: int, ranges: Sequence[tuple[MemoryRegion, int, int]]) -> list[bytes]: ...
    def counter_value(self, imm: int) -> int: ...
    def poll_counter(self, imm: int, total: int, for_seconds: float) -> int:
        """Polls until the counter is at `total` or more, or for `for_seconds`. Returns its
        value."""
    def expect(self, imm: int, total: int, *, at_least: bool) -> None: ...
    def subscribe(self, imm: int) -> None: ...
    def take_arrivals(self, imm: int) -> int: ...
    def release_counter(self, imm: int) -> None: ...
    def begin_release_counter(self, imm: int) -> bool:
        """Returns False if a completion "released" follows."""

class MoeExchange(metaclass=_Bound):
    """Dispatch and combine of token rows: docs/architecture.md. One thread at a time.

    It drains the engine, which must have a thread. A buffer is the address of contiguous rows of
    `hidden` elements. Dtypes are "f32", "bf16", "f16" and "f8_e4m3".
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        ranks: int,
        rank: int,
        experts: int,
        local_experts: Sequence[int],
        top_k: int,
        hidden: int,
        max_tokens: int,
        slots: int = 2,
        input_dtype: str = "bf16",
        wire_dtype: str = "bf16",
        combine_dtype: str = "bf16",
        output_dtype: str = "bf16",
        scale_block: int = 0,
        spin: float = 0.0,
        timeout: float = 30.0,
    ) -> None:
        """Takes `spin`, the seconds before a wait sleeps, and `timeout`, the seconds for a write
        over the engine."""
    # Pairs.
    @property
    def memory_fd(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def doorbell_fd(self) -> int: ...
    def add_local(self, rank: int, peer: int, memory: int, nbytes: int, doorbell: int) -> None:
        """Duplicates both descriptors."""
    def open_remote(self, rank: int, peer: int) -> bytes:
        """Returns terms for that rank's add_remote()."""
    def add_remote(self, rank: int, peer: int, terms: bytes) -> None: ...
    def remove(self, rank: int) -> None: ...
    def memory_parts(self) -> list[tuple[str, int]]: ...
    # Views.
    def set_view(
        self, number: int, alive: Sequence[bool], table: NDArray[np.int64], first_step: int
    ) -> None:
        """Sets the view. `table` has, by logical expert, rank << 32 | local expert, or -1."""
    def leave_out(self, step: int) -> None:
        """Marks a step that no rank runs: its dispatch_wait() says so."""
    def skip_step(self) -> None:
        """Skips the next step, which no rank runs."""
    def set_hosts(self, hosts: Sequence[int]) -> None:
        """Sets the host number of each rank; ranks of one host have added each other as local."""
    @property
    def next_step(self) -> int: ...
    def lost(self) -> list[int]: ...
    def why_lost(self, rank: int) -> tuple[str, str]:
        """Returns (code, text) of its last loss; the code is "ok" if it was not lost."""
    # A step.
    def input(self, slot: int) -> int:
        """Returns the address of room for max_tokens rows."""
    def answers(self, slot: int) -> int:
        """Returns the address of room for ranks * max_tokens rows by source, which combine_send()
        does not copy; 0 if there is none."""
    def check_free(self, slot: int) -> None:
        """Raises unless dispatch_send() is the slot's next call."""
    def check_placed(self, slot: int) -> None:
        """Raises unless combine_send() is the slot's next call."""
    def dispatch_send(
        self,
        slot: int,
        x: int,
        scales: int,
        ids: NDArray[np.int64],
        weights: NDArray[np.float32],
    ) -> int:
        """Returns the step. ids and weights are [count, top_k]; arrays of other types are
        converted. scales is 0 without scales."""
    def dispatch_wait(
        self, slot: int, timeout: float
    ) -> Literal["done", "left out", "events", "deadline"]: ...
    def arrival(
        self, slot: int, by_source: bool, align: int, capacity: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
        """Returns the rows of each local expert, the rows of each source rank, the first row of
        each source or expert, and the rows in all. By expert, the first rows are multiples of
        `align`, or `capacity` apart."""
    def place(
        self,
        slot: int,
        by_source: bool,
        begins: NDArray[np.int64],
        x: int,
        scales: int,
        ids: int,
        weights: int,
    ) -> tuple[int, ...]:
        """Writes the rows, and returns lost ranks whose rows are zero or absent. ids [rows, top_k]
        int32 and weights [rows, top_k] float32 are for an order by source only, otherwise 0."""
    def combine_send(self, slot: int, y: int) -> None: ...
    def combine_wait(self, slot: int, timeout: float) -> Literal["done", "events", "deadline"]: ...
    def combine(self, slot: int, out: int) -> tuple[int, ...]:
        """Returns the ranks that had rows of this one and whose contribution is absent."""
    def awaited(self, slot: int) -> list[int]: ...
    def events(
        self,
    ) -> list[tuple[str, int, int, str, str, bytes, str, int, list[tuple[int, str, str]]]]:
        """Returns completions as TransferEngine.drain(), without the exchange's own."""
    def quiet(self) -> bool:
        """Whether there are no events, and no rank of the view is lost."""
