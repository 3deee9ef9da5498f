"""The interface of a scaling backend, which Kubernetes and local processes implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar, TypeAlias

from kvxfer.instances import Role

Fence: TypeAlias = Callable[[], Awaitable[None]]
"""A call that raises NotLeader if another replica leads now. Backends make it before each write."""


class ScalingBackend(ABC):
    """A backend in one event loop. `role` is prefill or decode."""

    name: ClassVar[str]

    @abstractmethod
    async def requested(self, role: Role) -> int:
        """Returns the number of workers asked for, ready or not. Raises ScalingFailed."""

    @abstractmethod
    async def scale(self, role: Role, wanted: int, fence: Fence) -> None:
        """Asks for `wanted` workers and returns at once; they come and leave later.

        Raises NotLeader, with nothing written after it, and ScalingFailed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Releases what the backend holds."""
