"""kvxfer's connector and vLLM's NixlConnector with timestamps, taken by the same code.

They note when each request was scheduled and when its prompt was computed. The vLLM servers of the
benchmark load them. Times are from CLOCK_MONOTONIC, which is the same in all processes of a host.
"""

from __future__ import annotations

import os
import time
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

from benchmarks.vllm.notes import BUSY, FORWARD, NOTES_VARIABLE
from kvxfer.connectors.vllm.connector import KvxferConnector, StepMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _Timed(KVConnectorBase_V1):  # type: ignore[misc]
    """A mixin that goes before a connector."""

    @cached_property
    def _file(self) -> int:
        return os.open(os.environ[NOTES_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @cached_property
    def _server(self) -> str:
        settings: dict[str, str] = self._vllm_config.kv_transfer_config.kv_connector_extra_config
        return settings["instance_id"]

    @cached_property
    def _prompts(self) -> dict[str, int]:
        return {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        tokens, cached = (
            scheduler_output.num_scheduled_tokens,
            scheduler_output.scheduled_cached_reqs,
        )
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            self._note("scheduled", new.req_id, time.monotonic())
            self._prompts[new.req_id] = len(new.prompt_token_ids or ())
            computed[new.req_id] = new.num_computed_tokens
        metadata = super().build_connector_meta(scheduler_output)
        metadata.completes = [
            request_id
            for request_id, before in computed.items()
            if before < self._prompts[request_id] <= before + tokens[request_id]
        ]
        return metadata

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._completes: list[str] = connector_metadata.completes
        super().bind_connector_metadata(connector_metadata)

    def wait_for_save(self) -> None:
        now = time.monotonic()
        for request_id in self._completes:
            self._note("computed", request_id, now)
        super().wait_for_save()

    def _note(self, event: str, *values: str | float) -> None:
        words = (f"{value:.7f}" if isinstance(value, float) else value for value in values)
        os.write(self._file, f"{self._server} {event} {' '.join(words)}\n".encode())


class TimedNixlConnector(_Timed, NixlConnector):  # type: ignore[misc]
    """vLLM's NixlConnector."""


class TimedConnector(_Timed, KvxferConnector):
    """kvxfer's connector. Also notes the time that it uses of the forward's thread. For requests
    that ask for it by their id, the worker never waits."""

    _busy = False

    def on_new_request(self, request: Request) -> None:
        self._busy = BUSY in request.request_id
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, StepMetadata)
        if self._busy:
            metadata.plan.idle_seconds = 0.0
        return metadata

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, StepMetadata)
        self._sends = len(connector_metadata.plan.sends)
        self._layers: list[float] = []
        self._save = super().save_kv_layer
        begun = perf_counter()
        super().bind_connector_metadata(connector_metadata)
        self._before = perf_counter() - begun

    def save_kv_layer(self, layer_name: str, *arguments: Any, **more: Any) -> None:
        save = self._save
        begun = perf_counter()
        save(layer_name, *arguments, **more)
        self._layers.append(perf_counter() - begun)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._sends and self._layers:
            self._note(FORWARD, str(self._sends), self._before, median(self._layers))
