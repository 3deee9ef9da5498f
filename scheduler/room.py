"""The news that an instance can take more than before."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.instances import Instance


class Room:
    """The listeners to the news, in one event loop."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Instance | None], None]] = []

    def listen(self, listener: Callable[[Instance | None], None]) -> None:
        """Calls `listener` with each such instance, or with None if it may be any. The call happens
        within the step that made the room, so `listener` must only take note."""
        self._listeners.append(listener)

    def tell(self, instance: Instance | None) -> None:
        for listener in self._listeners:
            listener(instance)
