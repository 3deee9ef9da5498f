"""Updates of a worker's weights: a separate engine takes them, and a commit applies each wave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from kvxfer.engine import Engine
from kvxfer.errors import UnknownWeightUpdate
from kvxfer.kv import KvEndpoint
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.shards import WHOLE, holdings_of
from kvxfer.reference.versions import Policy, VersionGate
from kvxfer.reference.weight_receiver import staged_boxes
from kvxfer.weight_updates import Decision
from kvxfer.weights.transfer.receiver import WeightReceiver
from kvxfer.weights.transfer.staged import Staged

if TYPE_CHECKING:
    from kvxfer.client import ControlPlaneClient, Registration


class WorkerUpdates:
    """The weight updates of a worker that is an instance of one rank. Loop only.

    The model's identity changes with its weights: transfers of the previous version are cancelled,
    peers of another version are refused, and the control plane pairs the worker with others of its
    version.
    """

    registration: Registration | None = None
    """The worker's registration; set once there is one."""

    def __init__(
        self,
        model: LlamaModel,
        gate: VersionGate,
        endpoint: KvEndpoint,
        control_plane: ControlPlaneClient | None = None,
    ) -> None:
        """`control_plane` is asked for the outcome of an update whose coordinator was lost."""
        self._model, self._gate, self._endpoint = model, gate, endpoint
        self._control_plane = control_plane
        self._receiver: WeightReceiver | None = None
        self._failed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def receiving(
        self,
        engine: Engine,
        coordinator: str | None,
        dtype: str,
        arena_bytes: int | None = None,
    ) -> AsyncIterator[WeightReceiver]:
        """Takes updates of this type over an engine that is used for nothing else; dials the
        coordinator if one is given."""
        async with WeightReceiver(
            engine,
            holdings_of(self._model.config, WHOLE, dtype),
            instance_id=self._endpoint.instance_id,
            commit=self.commit,
            decided=None if self._control_plane is None else self._decided,
            version=self._gate.version,
            arena_bytes=arena_bytes,
        ) as self._receiver:
            if coordinator is not None:
                self._receiver.dial(coordinator)
            yield self._receiver

    async def failed(self) -> None:
        """Returns once an update failed while it was applied: the worker cannot serve any more."""
        await self._failed.wait()

    async def _decided(self, update_id: str) -> Literal["committed", "aborted"] | None:
        assert self._control_plane is not None  # noqa: S101 (it is asked for this only then)
        try:
            decided = await self._control_plane.decide_weight_update(
                update_id,
                Decision.ABORT,
                instance_id=self._endpoint.instance_id,
                secret=None if self.registration is None else self.registration.secret,
            )
        except UnknownWeightUpdate:
            return None
        return "committed" if decided.decision is Decision.COMMIT else "aborted"

    async def commit(self, staged: Staged) -> float:
        """Applies a pinned update and returns the pause in seconds. A failure ends the service."""
        assert self._receiver is not None  # noqa: S101 (it calls this)
        boxes = staged_boxes(self._receiver)

        def swap() -> int:
            version = staged.version if staged.last else self._model.weights_version
            self._model.apply(boxes, version, staged.waves == 1)
            return version

        async def settle() -> None:
            if self._endpoint.model is not None:
                await self._endpoint.set_model(
                    replace(self._endpoint.model, weights_version=staged.version)
                )

        try:
            policy = None if staged.policy is None else Policy(staged.policy)
            pause = await self._gate.update(
                swap, policy, settle, first=staged.first, last=staged.last
            )
        except Exception:
            self._failed.set()
            raise
        if staged.last and self.registration is not None and self._endpoint.model is not None:
            await self.registration.take_model(self._endpoint.model)
        return pause
