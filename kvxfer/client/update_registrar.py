"""The control plane as the registrar of a training job's weight updates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Final

from kvxfer.client.clients import ControlPlaneClient
from kvxfer.client.weight_update_report import WeightUpdateReport
from kvxfer.control_plane import Credentials
from kvxfer.errors import DecisionUnknown, KvxferError
from kvxfer.weight_updates import Decision, PartReport, PartState, UpdateError, UpdatePolicy
from kvxfer.weights.report import InstanceReport, UpdateReport
from kvxfer.weights.transfer.registrar import Announced

_ASKS: Final = 10
_PAUSE_SECONDS: Final = 0.5
_STATES: Final = {
    "committed": PartState.COMMITTED,
    "failed": PartState.FAILED,
    "lost": PartState.LOST,
    "partial": PartState.FAILED,
}


class ControlPlaneRegistrar:
    """A `Registrar` (kvxfer.weights.transfer): pass it to the Trainer of rank 0.

    Inference ranks join with the ids that their instances have at the control plane.
    """

    def __init__(
        self,
        model: str,
        *,
        url: str | None = None,
        credentials: Credentials | None = None,
        policy: UpdatePolicy = UpdatePolicy.DRAIN,
        required: bool = False,
    ) -> None:
        """Announces nothing yet.

        model: the name that the instances registered with. policy: the one to announce.
        required: there is no update without the control plane, which keeps the decision. Otherwise
        an update goes on if it does not answer.
        """
        self._model = model
        self._url, self._credentials = url, credentials
        self._policy, self._required = policy, required

    @contextlib.asynccontextmanager
    async def announce(
        self, update_id: str, version: int, instances: Sequence[str]
    ) -> AsyncIterator[Announced]:
        """Announces an update. Raises as WeightUpdateReport does."""
        async with (
            ControlPlaneClient(self._url, credentials=self._credentials) as client,
            WeightUpdateReport(
                client,
                model=self._model,
                version=version,
                update_id=update_id,
                policy=self._policy,
                instances=instances,
                required=self._required,
            ) as report,
        ):
            yield _Announced(report)


class _Announced:
    def __init__(self, report: WeightUpdateReport) -> None:
        self._report = report

    def staged(self, instance_id: str, digest: str | None) -> None:
        self._report.progress(
            PartReport(instance_id=instance_id, state=PartState.STAGED, digest=digest)
        )

    async def decide(self) -> bool:
        """Decides to commit; returns whether that holds. Asks again if there is no answer: the
        decision may have been recorded."""
        for _ in range(_ASKS):
            try:
                return await self._report.decide(Decision.COMMIT) is Decision.COMMIT
            except KvxferError as error:
                last = error
                await asyncio.sleep(_PAUSE_SECONDS)
        raise DecisionUnknown(
            f"the control plane does not say whether update {self._report.update_id} is committed; "
            f"its instances ask for it: {last}"
        ) from last

    async def ended(self, report: UpdateReport) -> None:
        self._report.progress(*(_part(each) for each in report.instances), sent_bytes=report.nbytes)
        await self._report.end("committed")


def _part(report: InstanceReport) -> PartReport:
    error = None
    if report.error is not None:
        error = UpdateError(code=KvxferError.code, message=report.error[:2048])
    return PartReport(
        instance_id=report.instance_id,
        state=_STATES.get(report.state),
        version=report.version,
        digest=report.digest,
        pause_seconds=report.pause_seconds,
        error=error,
    )
