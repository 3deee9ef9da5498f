"""The news that an instance can take more than before, for those who wait for it."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.instances import Instance


class Room:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Instance | None], None]] = []

    def listen(self, listener: Callable[[Instance | None], None]) -> None:
        """`listener` is called with the instance, and with None where it may be any; within the
        step that made the room, so it only takes note."""
        self._listeners.append(listener)

    def tell(self, instance: Instance | None) -> None:
        for listener in self._listeners:
            listener(instance)
