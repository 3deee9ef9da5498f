"""One vLLM worker as a member of a training job's weight updates."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from kvxfer.cluster_key import read_cluster_key
from kvxfer.connectors.cores import leave_openmp_cores
from kvxfer.connectors.transfer_engine import DEFAULT_HOST
from kvxfer.engine import Engine
from kvxfer.engine.operator_options import (
    JSON_OPTIONS,
    OperatorOptions,
    engine_options,
    read_options,
)
from kvxfer.loop_thread import START_SECONDS, LoopThread
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.transfer.receiver import WeightReceiver
from kvxfer.weights.transfer.staged import Staged

# vLLM shows its own loggers' info messages, and only warnings of others.
_LOG: Final = logging.getLogger("vllm.kvxfer")
_CALL_SECONDS: Final = 10.0
_JOIN_SECONDS: Final = 0.75 * START_SECONDS
_KEY_FILE: Final = "cluster_key_file"
_SETTING: Final = "kvxfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """Settings from vLLM's `--additional-config '{"kvxfer": {…}}'`. Missing ones come from the
    configuration of the instance's KvxferConnector, if it has one."""

    cluster_key: bytes = field(repr=False)
    options: OperatorOptions = field(default_factory=OperatorOptions)
    """Options of the transfer engine of each rank."""

    @classmethod
    def read(cls, vllm_config: Any, host: str | None = None) -> Self:
        """Reads the settings. Raises InvalidArgument, which names the setting. Engines listen at
        `host` if the settings have none."""
        own = (vllm_config.additional_config or {}).get(_SETTING, {})
        kv = vllm_config.kv_transfer_config
        connector = {}
        if kv is not None and kv.kv_connector == "KvxferConnector":
            extra = kv.kv_connector_extra_config
            connector = {name: extra[name] for name in (_KEY_FILE, *JSON_OPTIONS) if name in extra}
        given = {**connector, **own}
        key_file = given.get(_KEY_FILE)
        options = read_options(given, f"additional_config.{_SETTING}.{{}}".format, {_KEY_FILE})
        options.setdefault("host", host or DEFAULT_HOST)
        return cls(
            cluster_key=read_cluster_key(Path(key_file) if key_file else None), options=options
        )


class Member(LoopThread):
    """A thread with an event loop, which owns the engine and the receiver. Any thread may call it,
    one at a time."""

    receiver: WeightReceiver

    def __init__(
        self,
        settings: MemberSettings,
        holdings: Holdings,
        coordinator: str,
        *,
        instance_id: str,
        rank: int,
        ranks: int,
        version: int,
    ) -> None:
        super().__init__()
        self._settings, self._holdings, self._coordinator = settings, holdings, coordinator
        self._place = (instance_id, rank, ranks)
        self._version = version

    async def _serve(self) -> None:
        leave_openmp_cores()
        instance_id, rank, ranks = self._place
        options = engine_options(self._settings.options, None, _LOG)
        options["name"] = f"{instance_id}-weights-{rank}"
        async with Engine(cluster_key=self._settings.cluster_key, **options) as engine:
            receiver = WeightReceiver(
                engine,
                self._holdings,
                instance_id=instance_id,
                rank=rank,
                ranks=ranks,
                version=self._version,
            )
            async with receiver:
                self.receiver = receiver
                await receiver.join(self._coordinator, _JOIN_SECONDS)
                self._started.set_result(None)
                await self._closing.wait()

    def pin(self, update_id: str) -> Staged:
        """Pins a staged update. Raises NotStaged."""

        async def pin() -> Staged:
            return self.receiver.pin(update_id)

        return self.run(pin(), _CALL_SECONDS)

    def unpin(self, staged: Staged) -> None:
        async def unpin() -> None:
            self.receiver.unpin(staged.update_id)

        self.run(unpin(), _CALL_SECONDS)

    def applied(self, staged: Staged, seconds: float) -> None:
        """Reports to the coordinator that this rank serves the update, and how long that took."""

        async def applied() -> None:
            self.receiver.applied(staged, seconds)

        self.run(applied(), _CALL_SECONDS)

    def broken(self, staged: Staged, error: BaseException) -> None:
        """Reports to the coordinator that this instance is out of service."""

        async def broken() -> None:
            self.receiver.broken(staged, error)

        self.run(broken(), _CALL_SECONDS)
