"""The place where updates are announced and decisions recorded, such as a control plane."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvxfer.weights.report import UpdateReport


class Announced(Protocol):
    """An announced update. Only decide() and ended() may take time, and they have deadlines."""

    def staged(self, instance_id: str, digest: str | None) -> None:
        """Reports that all ranks of an instance have staged it."""

    async def decide(self) -> bool:
        """Records the decision to commit; returns False if an abort was recorded first. Raises
        DecisionUnknown."""

    async def ended(self, report: UpdateReport) -> None:
        """Reports the outcome, once all have answered."""


class Registrar(Protocol):
    """A recorder of updates and their decisions, such as kvxfer.client.ControlPlaneRegistrar."""

    def announce(
        self, update_id: str, version: int, instances: Sequence[str]
    ) -> contextlib.AbstractAsyncContextManager[Announced]:
        """Announces an update, which ends with the context; it is aborted if the body raises.
        Raises the error of a registrar that refuses it."""


class NoRegistrar:
    """A Registrar that records nothing, and its Announced: the coordinator alone decides."""

    @contextlib.asynccontextmanager
    async def announce(self, *_: object) -> AsyncIterator[Announced]:
        yield self

    def staged(self, *_: object) -> None:
        return

    async def decide(self) -> bool:
        return True

    async def ended(self, *_: object) -> None:
        return
