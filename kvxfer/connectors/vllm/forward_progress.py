"""How far vLLM's forward is, as a word that the engine watches: writes are submitted before it, and
leave when their layer is computed. Of the forward it takes one addition per layer, and one call
that wakes the engine at its end. On a GPU the stream of the forward adds, once it gets there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.engine import Watcher, WatchFor


@dataclass(frozen=True, slots=True)
class Step:
    """One forward. `base` is where the word was before it."""

    watcher: Watcher
    base: int

    def after(self, layer: int) -> WatchFor:
        """For the writes of a layer."""
        return self.watcher.at(self.base + layer + 1)


class ForwardProgress:
    """One thread: that of the forward. `stream`: the CUDA stream that it puts its work on now; None
    where it computes itself."""

    def __init__(
        self,
        make_watcher: Callable[[], Watcher],
        layers: Sequence[str],
        stream: Callable[[], Any] | None = None,
    ) -> None:
        self._make_watcher = make_watcher
        self._stream = stream
        self._up_to = {name: index + 1 for index, name in enumerate(layers)}
        self._layers = self._reached = len(layers)
        self._step: Step | None = None

    def begin(self) -> Step:
        """A forward begins. What waits for layers of one before that it has not reached never
        leaves: they may not have been computed."""
        if self._step is None or self._reached < self._layers:
            self._step = Step(self._make_watcher(), 0)
        else:
            self._step = Step(self._step.watcher, self._step.base + self._layers)
        self._reached = 0
        self._count = self._counting(self._step.watcher)
        return self._step

    def _counting(self, watcher: Watcher) -> Callable[[int], object]:
        stream = self._stream
        if stream is None:
            return watcher.count
        return lambda layers: watcher.add_on(stream(), layers)

    def computed(self, layer: str) -> None:
        """A layer of the forward is computed, and so is every layer before it."""
        layers = self._up_to.get(layer, 0)
        if layers > self._reached:
            self._count(layers - self._reached)
            self._reached = layers

    def end(self) -> None:
        """All layers of the forward are computed, or lie before this in its stream: also those
        that were not told of, as in a CUDA graph."""
        if self._step is None:
            return
        left, self._reached = self._layers - self._reached, self._layers
        if self._stream is None:
            self._step.watcher.add(left)  # wakes the engine in any case
        elif left:
            self._count(left)
