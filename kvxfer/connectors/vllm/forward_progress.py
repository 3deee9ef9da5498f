"""The progress of vLLM's forward, as a word that the engine watches: writes are submitted before
the forward, and leave when their layer is computed. This costs the forward one addition per layer,
and one call at its end that wakes the engine. On a GPU the forward's stream does the additions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.engine import Watcher, WatchFor


@dataclass(frozen=True, slots=True)
class Step:
    """One forward. `base` is the word's value before it."""

    watcher: Watcher
    base: int

    def after(self, layer: int) -> WatchFor:
        """Returns the condition for the writes of a layer."""
        return self.watcher.at(self.base + layer + 1)


class ForwardProgress:
    """The progress of one forward after the other. One thread: that of the forward. `stream`
    returns the CUDA stream that gets its work now; None if the thread computes itself."""

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
        """Begins a forward. Writes that wait for layers that the previous forward did not reach
        never leave, as these layers may not have been computed."""
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
        """Counts a layer of the forward as computed, and every layer before it."""
        layers = self._up_to.get(layer, 0)
        if layers > self._reached:
            self._count(layers - self._reached)
            self._reached = layers

    def end(self) -> None:
        """Counts all layers of the forward as computed, or as queued in its stream before this:
        also layers without a call of computed(), as in a CUDA graph."""
        if self._step is None:
            return
        left, self._reached = self._layers - self._reached, self._layers
        if self._stream is None:
            self._step.watcher.add(left)  # wakes the engine in any case
        elif left:
            self._count(left)
