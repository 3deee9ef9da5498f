"""Layers leave in the order of the stream that computes them."""

from __future__ import annotations

from typing import Protocol

from kvxfer.engine import Engine, WatchFor


class Stream(Protocol):
    """The part of a torch.cuda.Stream that is needed here."""

    @property
    def cuda_stream(self) -> int:
        """The CUstream."""

    def synchronize(self) -> None:
        """Waits for all that is queued on it."""


class StreamOrder:
    """The progress of a GPU's stream, for the engine. One thread at a time."""

    def __init__(self, engine: Engine, gpu: int, stream: Stream) -> None:
        self._watcher = engine.watcher(gpu=gpu)
        self._stream = stream
        self._marks = 0

    def mark(self) -> WatchFor:
        """Returns the condition for a write that must wait for all that is on the stream now. Does
        not wait itself."""
        self._watcher.add_on(self._stream)
        self._marks += 1
        return self._watcher.at(self._marks)

    def settle(self) -> None:
        """Waits for the stream: nothing on it touches blocks any more."""
        self._stream.synchronize()
