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
OPTION_NAMES: tuple[str, ...]
DEFAULT_PEER_TIMEOUT: float

class Error(Exception):
    """args: (code, message); `kvxfer.errors.by_code` has the public class."""

_Integers: TypeAlias = Sequence[int] | Buffer | np.ndarray[Any, Any] | _SupportsArray
"""One dimension: a sequence, a buffer of any type of integer, or what gives an array."""

_Readable: TypeAlias = Buffer | np.ndarray[Any, Any]
_Writable: TypeAlias = Buffer | np.ndarray[Any, Any]
"""Contiguous. numpy says that its arrays are buffers only where Python is 3.12 or newer."""

class _SupportsArray(Protocol):
    """A tensor, say."""

    def __array__(self) -> NDArray[Any]: ...

class _Bound(type):
    """pybind11's metaclass."""

class NicFactory(metaclass=_Bound):
    """NICs beside those of the host."""

def end_unused_gpus() -> None:
    """Gives back what is kept of GPUs for the next engine. Waits for all streams."""

def null_nics(*, keeps_order: bool) -> NicFactory:
    """A network of NICs that move nothing; each engine made with it has one."""

class EngineOptions(metaclass=_Bound):
    """As `kvxfer.EngineOptions` describes them, with a `cluster_key`. Instead of `fabrics` there
    are the flags `local` and `tcp`, and `verbs` and `ofi`: "never", "if_available" or "required".
    `more_nics` is a NicFactory."""

    def __init__(self, **options: object) -> None:
        """OPTION_NAMES; those that are left out have the defaults of types.hpp."""

class SharedMemory(Buffer):
    """Zeroed host memory that peers on this host can map; a writable buffer of bytes."""

    def __init__(self, nbytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class MemoryRegion(Buffer):
    """Registered memory; a writable buffer of bytes where it is host memory."""

    def __init__(self, region: MemoryRegion) -> None:
        """Another handle of the same region."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def gpu(self) -> int | None:
        """CUDA's number, in this process, of the GPU that it is memory of; None for host memory."""
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
    """A 64-bit word of host memory at zero; `address` is where compute adds to it."""

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
        """False while the stream waits. Raises what has ended the wait."""
    @property
    def address(self) -> int: ...

class CounterMirror(metaclass=_Bound):
    @property
    def value(self) -> int: ...
    @property
    def address(self) -> int: ...

class TransferEngine(metaclass=_Bound):
    """Any method from any thread. Submitting returns (operation id, writes, bytes)."""

    def __init__(self, options: EngineOptions) -> None: ...
    def close(self) -> None: ...
    def poll(self) -> bool:
        """Without a thread: does what there is to do. Whether anything moved."""
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
        """Completions: (kind, id, peer, code, text, data, fabric, CLOCK_MONOTONIC ns, failed).

        id: of the operation; the immediate of counter, arrival and released; of peer_up 1 if the
        peer has connected, 0 if this engine has. failed: the parts of a write that failed:
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
        """The operation's id, and the nanoseconds that scatter() took in native code: to each peer
        its `length` bytes of the source, one part after the other."""

    def barrier(
        self,
        peers: Sequence[int],
        imm: int,
        *,
        timeout: float | None,
        after: tuple[WatchWord, int] | None,
    ) -> tuple[int, int, list[int], int]: ...
    def wake(self) -> None:
        """Looks at watched words now."""
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
        """Polls until the counter is at `total` or more, or for so many seconds. Its value."""
    def expect(self, imm: int, total: int, *, at_least: bool) -> None: ...
    def subscribe(self, imm: int) -> None: ...
    def take_arrivals(self, imm: int) -> int: ...
    def release_counter(self, imm: int) -> None: ...
    def begin_release_counter(self, imm: int) -> bool:
        """False: a completion "released" follows."""

class MoeExchange(metaclass=_Bound):
    """Dispatch and combine of token rows: docs/architecture.md. One thread at a time.

    It drains the engine, which must have a thread. Buffers are given by their address: contiguous
    rows of `hidden` elements. Dtypes are "f32", "bf16", "f16" and "f8_e4m3".
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
        """`spin`: seconds before a wait sleeps. `timeout`: seconds of a write over the engine."""
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
        """Terms for that rank's add_remote()."""
    def add_remote(self, rank: int, peer: int, terms: bytes) -> None: ...
    def remove(self, rank: int) -> None: ...
    def memory_parts(self) -> list[tuple[str, int]]: ...
    # Views.
    def set_view(
        self, number: int, alive: Sequence[bool], table: NDArray[np.int64], first_step: int
    ) -> None:
        """table: by logical expert, rank << 32 | local expert, or -1."""
    def leave_out(self, step: int) -> None:
        """No rank runs it: its dispatch_wait() says so."""
    def skip_step(self) -> None:
        """Does not take the next step, which no rank runs."""
    def set_hosts(self, hosts: Sequence[int]) -> None:
        """By rank, a number of its host; ranks of one have added each other as local."""
    @property
    def next_step(self) -> int: ...
    def lost(self) -> list[int]: ...
    def why_lost(self, rank: int) -> tuple[str, str]:
        """(code, text) of its last loss; code "ok": it was not lost."""
    # A step.
    def input(self, slot: int) -> int:
        """The address of room for max_tokens rows."""
    def answers(self, slot: int) -> int:
        """The address of room for ranks * max_tokens rows by source, which combine_send() does not
        copy; 0: there is none."""
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
        """The step. ids and weights are [count, top_k]; others are converted. scales 0: none."""
    def dispatch_wait(
        self, slot: int, timeout: float
    ) -> Literal["done", "left out", "events", "deadline"]: ...
    def arrival(
        self, slot: int, by_source: bool, align: int, capacity: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
        """Rows by local expert, rows by source rank, where those of each source or expert begin,
        and the rows of all. Only by expert: a multiple of `align`, or `capacity` apart."""
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
        """ids [rows, top_k] int32 and weights [rows, top_k] float32 only by source, else 0. Lost
        ranks whose rows are zero or not there."""
    def combine_send(self, slot: int, y: int) -> None: ...
    def combine_wait(self, slot: int, timeout: float) -> Literal["done", "events", "deadline"]: ...
    def combine(self, slot: int, out: int) -> tuple[int, ...]:
        """Ranks that had rows of ours, and whose contribution is absent."""
    def awaited(self, slot: int) -> list[int]: ...
    def events(
        self,
    ) -> list[tuple[str, int, int, str, str, bytes, str, int, list[tuple[int, str, str]]]]:
        """As TransferEngine.drain(), without what is the exchange's."""
    def quiet(self) -> bool:
        """There are none, and no rank of the view is lost."""
