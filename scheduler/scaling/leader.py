"""Which replica applies decisions: the interface, and the leader of a control plane that is one.

A leader has a term, named by its fencing token: each later term has a greater one. What it writes
is fenced by `confirm`, right before the write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Leader(ABC):
    """One replica's part in the election. Belongs to one event loop."""

    @abstractmethod
    async def campaign(self) -> int | None:
        """Begins or prolongs a term. Returns its token, or None where another replica leads.

        Raises ControlPlaneUnavailable if that is not known; then this replica does not lead.
        """

    @abstractmethod
    async def confirm(self, token: int) -> None:
        """Raises NotLeader unless the term of this token still runs."""

    @abstractmethod
    async def resign(self) -> None:
        """Ends the term, so that another replica need not wait for its end."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of what the election holds; resign before."""


class OnlyReplica(Leader):
    """Leads always: the registry is in this process, so there is no other replica."""

    async def campaign(self) -> int | None:
        return 1

    async def confirm(self, token: int) -> None:
        pass

    async def resign(self) -> None:
        pass

    async def close(self) -> None:
        pass
