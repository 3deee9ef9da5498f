"""The election of the replica that applies decisions, and the leader of a single replica.

A leader has a term, named by its fencing token: each later term has a greater one. `confirm` fences
each write of the leader, right before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Leader(ABC):
    """One replica's part in the election. Belongs to one event loop."""

    @abstractmethod
    async def campaign(self) -> int | None:
        """Begins or prolongs a term. Returns its token, or None if another replica leads.

        Raises ControlPlaneUnavailable if that is unknown; this replica then does not lead.
        """

    @abstractmethod
    async def confirm(self, token: int) -> None:
        """Raises NotLeader unless the term of this token still runs."""

    @abstractmethod
    async def resign(self) -> None:
        """Ends the term, so that another replica need not wait for its end."""

    @abstractmethod
    async def close(self) -> None:
        """Releases what the election holds; resign first."""


class OnlyReplica(Leader):
    """A leader that always leads: the registry is in this process, without other replicas."""

    async def campaign(self) -> int | None:
        return 1

    async def confirm(self, token: int) -> None:
        pass

    async def resign(self) -> None:
        pass

    async def close(self) -> None:
        pass
