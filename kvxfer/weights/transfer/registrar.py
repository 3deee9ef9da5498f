"""Where updates are announced and decisions recorded, such as a control plane."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvxfer.errors import WeightUpdateError
from kvxfer.weights.report import UpdateReport


class DecisionUnknown(WeightUpdateError):
    """Whether the decision was recorded is not known: no member may be told either."""

    code = "decision-unknown"


class Announced(Protocol):
    """One update. Only decide() and ended() may take time, and they have deadlines."""

    def staged(self, instance_id: str, digest: str | None) -> None:
        """All ranks of an instance have it."""

    async def decide(self) -> bool:
        """Whether it is to be committed: false where an abort was recorded first. Raises
        DecisionUnknown."""

    async def ended(self, report: UpdateReport) -> None:
        """All have answered."""


class Registrar(Protocol):
    """What is told of updates and records their decisions; kvxfer.client.ControlPlaneRegistrar is
    one."""

    def announce(
        self, update_id: str, version: int, instances: Sequence[str]
    ) -> contextlib.AbstractAsyncContextManager[Announced]:
        """An update begins; it ends with the context, aborted where that raises. Raises what
        refuses it."""


class NoRegistrar:
    """The coordinator alone decides. An Announced, too."""

    @contextlib.asynccontextmanager
    async def announce(self, *_: object) -> AsyncIterator[Announced]:
        yield self

    def staged(self, *_: object) -> None:
        return

    async def decide(self) -> bool:
        return True

    async def ended(self, *_: object) -> None:
        return
