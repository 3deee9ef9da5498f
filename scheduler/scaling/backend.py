"""What brings a decision about: the interface that Kubernetes and local processes implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar, TypeAlias

from kvxfer.instances import Role

Fence: TypeAlias = Callable[[], Awaitable[None]]
"""Raises NotLeader where another replica leads by now. Backends call it right before a write."""


class ScalingBackend(ABC):
    """Belongs to one event loop. `role` is prefill or decode."""

    name: ClassVar[str]

    @abstractmethod
    async def requested(self, role: Role) -> int:
        """The workers that were asked for, ready or not. Raises ScalingFailed."""

    @abstractmethod
    async def scale(self, role: Role, wanted: int, fence: Fence) -> None:
        """Asks for so many workers and returns; they come and leave in their own time.

        Raises NotLeader, with nothing written after it, and ScalingFailed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Lets go of what the backend holds."""
