"""Words that compute counts up, to start transfers, and waits of streams for transfers."""

from __future__ import annotations

import operator
from typing import NamedTuple

from kvxfer.engine.arguments import REFUSALS, Count, Stream, refused
from kvxfer.engine.native import native, translated
from kvxfer.errors import InvalidArgument


class WatchFor(NamedTuple):
    """What a write waits for: that the word is at `value` or above it. `Watcher.at()` makes it; it
    keeps the word alive."""

    word: native.WatchWord
    value: int


def stream_handle(stream: Stream) -> int:
    """Of a CUstream, a torch.cuda.Stream, or what has `__cuda_stream__`. Raises TypeError."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        _version, handle = stream.__cuda_stream__()
        return int(handle)
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    raise TypeError(stream)


class Watcher:
    """A 64-bit word of host memory, at zero, that compute adds to.

    A write submitted with `after=watcher.at(n)` is checked and queued at once, and starts when
    the word has reached n: layer n of a transfer is submitted beforehand and leaves as soon as
    its kernel has counted. Its deadline runs from submission. add() starts it at once. After
    count(), or a plain store of native or GPU code to `address`, it starts within 100 µs, or within
    a sixteenth of the time that the engine has moved nothing for where that is longer, 1 ms at
    most. One engine thread, the one that moves the bytes, serves all watchers of an engine.

    A watcher of a GPU is counted up by streams alone, with add_on().

    Keep the watcher for as long as anybody adds to `address`, or runs a graph that does. Any
    thread.
    """

    __slots__ = ("_engine", "_on_gpu", "_word")

    def __init__(
        self, engine: native.TransferEngine, on_gpu: native.StreamWord | None = None
    ) -> None:
        self._engine = engine
        self._on_gpu = on_gpu
        self._word = native.WatchWord() if on_gpu is None else on_gpu.word

    @property
    def address(self) -> int:
        """Of the word: 8 bytes, aligned, in this process. Add to it atomically."""
        return self._word.address

    @property
    def value(self) -> int:
        """What the word has been counted up to."""
        return self._word.value

    def count(self, by: Count = 1) -> int:
        """Adds without a call that wakes the engine. Returns the new value."""
        if self._on_gpu is not None:
            raise InvalidArgument(
                f"streams of a GPU count this watcher up; use add_on(stream, {by}), or a watcher "
                "of no GPU"
            )
        try:
            return self._word.add(by)
        except REFUSALS as error:
            raise refused(error, Watcher.count, locals()) from None

    def add(self, by: Count = 1) -> int:
        """Adds, and starts what waited for that. Returns the new value."""
        value = self.count(by)
        self._engine.wake()
        return value

    def add_on(self, stream: Stream, by: Count = 1) -> None:
        """Queues on a CUDA stream that the word grows by `by` once all that the stream has before
        it has ended. No thread waits. A stream that is captured counts at each run of the graph.

        stream: a torch.cuda.Stream, an object with `__cuda_stream__`, or a CUstream as an int, of
        the watcher's GPU. To go on with another stream, let that wait for this one. Raises
        InvalidArgument for a watcher of no GPU.
        """
        if self._on_gpu is None:
            raise InvalidArgument(
                "a stream cannot count up a watcher of no GPU; make it with engine.watcher(gpu=…)"
            )
        try:
            self._on_gpu.add_on(stream_handle(stream), by)
        except REFUSALS as error:
            raise refused(error, Watcher.add_on, locals()) from None

    def at(self, value: Count) -> WatchFor:
        """For the `after` of a write."""
        try:
            reached = operator.index(value)
        except TypeError as error:
            raise refused(error, Watcher.at, locals()) from None
        if not 0 <= reached < 1 << 64:
            raise InvalidArgument(f"value is {value}; a watcher counts from 0 to 2**64 - 1")
        return WatchFor(self._word, reached)

    def __repr__(self) -> str:
        return f"Watcher(address={self.address:#x}, value={self.value})"


class StreamWait:
    """A CUDA stream's wait for a counter: `Counter.wait_on()` makes it."""

    __slots__ = ("_native",)

    def __init__(self, wait: native.StreamWait) -> None:
        self._native = wait

    def reached(self) -> bool:
        """False while the stream waits for the counter, then true.

        Raises what has ended the wait instead: StaleCounter, DeadlineExceeded, EngineClosed, or
        EngineError if more arrived than announced. Then the stream goes on without the bytes. So
        call this once the stream has been synchronized, before any result of it is used.
        """
        with translated():
            return self._native.reached()

    @property
    def address(self) -> int:
        """Where kernels read the same: 8 bytes, whose lowest is 1 once the counter got there, and
        more if it failed."""
        return self._native.address


class CounterMirror:
    """A counter as kernels of a GPU read it: `Counter.mirror()` makes it.

    8 bytes at `address`. Bits 8 and up are the count, and what was counted over tcp or on one host
    is in the GPU's memory for kernels that read it so (`ld.acquire.sys`). What a NIC has written
    (GPUDirect) is there for work that begins later. The lowest byte is 0 while the counter is live,
    and more once it was released, or its engine closed. A kernel that waits looks at both; nothing
    else ends its wait. Keep the mirror until no kernel reads it.
    """

    __slots__ = ("_native",)

    def __init__(self, mirror: native.CounterMirror) -> None:
        self._native = mirror

    @property
    def address(self) -> int:
        """Of the word, on the host and on the GPU."""
        return self._native.address

    @property
    def value(self) -> int:
        """Of the word, now."""
        return self._native.value
