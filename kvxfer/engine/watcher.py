"""Words that compute adds to in order to start transfers, and waits of streams for transfers."""

from __future__ import annotations

import operator
from typing import NamedTuple

from kvxfer.engine.arguments import REFUSALS, Count, Stream, refused
from kvxfer.engine.native import native, translated
from kvxfer.errors import InvalidArgument


class WatchFor(NamedTuple):
    """A condition that a write waits for: the word is at `value` or above it. `Watcher.at()` makes
    it; it keeps the word alive."""

    word: native.WatchWord
    value: int


def stream_handle(stream: Stream) -> int:
    """Returns the handle of a CUstream, a torch.cuda.Stream, or an object with `__cuda_stream__`.
    Raises TypeError."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        _version, handle = stream.__cuda_stream__()
        return int(handle)
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    raise TypeError(stream)


class Watcher:
    """A 64-bit word of host memory, initially zero, that compute adds to.

    A write submitted with `after=watcher.at(n)` is checked and queued at once, and starts when
    the word has reached n: layer n of a transfer is submitted beforehand and leaves as soon as
    its kernel has counted. Its deadline runs from submission. add() starts it at once. After
    count(), or a plain store of native or GPU code to `address`, it starts within 100 µs. If the
    engine has moved nothing for a while, it starts within a sixteenth of that time, at most 1 ms.
    The engine thread that moves the bytes also serves all watchers of an engine.

    Only streams add to a watcher of a GPU, with add_on().

    Keep the watcher as long as anything adds to `address`, or runs a graph that does. Any thread.
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
        """The address of the word in this process: 8 bytes, aligned. Add to it atomically."""
        return self._word.address

    @property
    def value(self) -> int:
        """The current value of the word."""
        return self._word.value

    def count(self, by: Count = 1) -> int:
        """Adds without waking the engine. Returns the new value."""
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
        """Adds, and starts the writes that waited for it. Returns the new value."""
        value = self.count(by)
        self._engine.wake()
        return value

    def add_on(self, stream: Stream, by: Count = 1) -> None:
        """Makes a CUDA stream add `by` to the word once its earlier work has ended. No thread
        waits. A stream that is captured adds at each run of the graph.

        stream: a torch.cuda.Stream, an object with `__cuda_stream__`, or a CUstream as an int, of
        the watcher's GPU. To continue with another stream, let that wait for this one. Raises
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
        """Returns the condition for the `after` of a write."""
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
        """Returns False while the stream waits for the counter, then True.

        Raises the error that ended the wait instead: StaleCounter, DeadlineExceeded, EngineClosed,
        or EngineError if more arrived than announced. Then the stream continues without the bytes.
        So call this once the stream has been synchronized, before any result of it is used.
        """
        with translated():
            return self._native.reached()

    @property
    def address(self) -> int:
        """The address of the same state for kernels: 8 bytes, whose lowest is 1 once the counter
        has reached the total, and more if the wait failed."""
        return self._native.address


class CounterMirror:
    """A counter for kernels of a GPU to read: `Counter.mirror()` makes it.

    8 bytes at `address`. Bits 8 and up are the count. A kernel that reads it with `ld.acquire.sys`
    then finds the bytes that were counted over tcp or on one host in the GPU's memory. Bytes that a
    NIC has written (GPUDirect) are there for work that begins later. The lowest byte is 0 while the
    counter is live, and more once it was released, or its engine closed. A kernel that waits checks
    both; nothing else ends its wait. Keep the mirror until no kernel reads it.
    """

    __slots__ = ("_native",)

    def __init__(self, mirror: native.CounterMirror) -> None:
        self._native = mirror

    @property
    def address(self) -> int:
        """The address of the word, on the host and on the GPU."""
        return self._native.address

    @property
    def value(self) -> int:
        """The current value of the word."""
        return self._native.value
