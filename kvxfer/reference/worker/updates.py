"""Updates of a worker's weights: an engine apart takes them, and one commit applies each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvxfer.engine import Engine
from kvxfer.kv import KvEndpoint
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.shards import WHOLE, holdings_of
from kvxfer.reference.versions import VersionGate
from kvxfer.reference.weight_receiver import staged_boxes
from kvxfer.weights.transfer.receiver import Staged, WeightReceiver

if TYPE_CHECKING:
    from kvxfer.client import Registration


class WorkerUpdates:
    """Of a worker that is an instance of one rank. Loop only.

    The model's identity changes with its weights: transfers of the version before are cancelled,
    peers of another version are refused, and the control plane pairs the worker with others of its
    version.
    """

    registration: Registration | None = None
    """To be set once there is one."""

    def __init__(self, model: LlamaModel, gate: VersionGate, endpoint: KvEndpoint) -> None:
        self._model, self._gate, self._endpoint = model, gate, endpoint
        self._receiver: WeightReceiver | None = None
        self._failed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def receiving(
        self, engine: Engine, coordinator: str | None, dtype: str
    ) -> AsyncIterator[WeightReceiver]:
        """Takes updates of this type over an engine that is used for nothing else; dials the
        coordinator where one is given."""
        async with (
            WeightReceiver(
                engine,
                holdings_of(self._model.config, WHOLE, dtype),
                instance_id=self._endpoint.instance_id,
                commit=self.commit,
                version=self._gate.version,
            ) as self._receiver,
            _dialing(self._receiver, coordinator),
        ):
            yield self._receiver

    async def failed(self) -> None:
        """Returns once the worker cannot serve any more: an update failed while it was applied."""
        await self._failed.wait()

    async def commit(self, staged: Staged) -> float:
        """Applies a pinned update; the pause in seconds. What fails in it ends the service."""
        assert self._receiver is not None  # noqa: S101 (it calls this)
        boxes = staged_boxes(self._receiver)

        def swap() -> int:
            self._model.apply(boxes, staged.version)
            return staged.version

        async def settle() -> None:
            if self._endpoint.model is not None:
                await self._endpoint.set_model(
                    replace(self._endpoint.model, weights_version=staged.version)
                )

        try:
            pause = await self._gate.update(swap, settle=settle)
        except Exception:
            self._failed.set()
            raise
        if self.registration is not None and self._endpoint.model is not None:
            await self.registration.take_model(self._endpoint.model)
        return pause


@contextlib.asynccontextmanager
async def _dialing(receiver: WeightReceiver, coordinator: str | None) -> AsyncIterator[None]:
    """Dials again and again: the coordinator need not be there yet."""
    if coordinator is None:
        yield
        return
    dialing = asyncio.create_task(receiver.join(coordinator, timeout=float("inf")))
    try:
        yield
    finally:
        dialing.cancel()
