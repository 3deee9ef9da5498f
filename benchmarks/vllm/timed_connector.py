"""The connector, with a note of when each request was scheduled and its prompt computed; and, for
requests that ask for it by their id, one that sends nothing before the whole prompt is computed, or
that never waits.

Loaded by the vLLM servers of the benchmark. Notes have CLOCK_MONOTONIC, which is the same in every
process of a host.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from benchmarks.vllm.notes import BUSY, LATE, NOTES_VARIABLE
from kvxfer.connectors.vllm.connector import KvxferConnector, StepMetadata
from kvxfer.connectors.vllm.plan import Send

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class TimedConnector(KvxferConnector):
    _busy = False

    @cached_property
    def _notes(self) -> int:
        return os.open(os.environ[NOTES_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def on_new_request(self, request: Request) -> None:
        self._busy = BUSY in request.request_id
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        for request in scheduler_output.scheduled_new_reqs:
            self._note("scheduled", request.req_id)
        metadata = super().build_connector_meta(scheduler_output)
        if self._busy:
            metadata.plan.idle_seconds = 0.0
        return metadata

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, StepMetadata)
        plan = connector_metadata.plan
        plan.sends = [_held_back(send) if LATE in send.request_id else send for send in plan.sends]
        self._late = any(LATE in send.request_id for send in plan.sends)
        self._computed = [s.request_id for s in plan.sends if s.until == s.num_blocks]
        super().bind_connector_metadata(connector_metadata)

    def save_kv_layer(self, layer_name: str, *arguments: Any, **more: Any) -> None:
        if not self._late:
            super().save_kv_layer(layer_name, *arguments, **more)

    def wait_for_save(self) -> None:
        for request_id in self._computed:
            self._note("computed", request_id)
        super().wait_for_save()

    def _note(self, event: str, request_id: str) -> None:
        line = f"{self._settings.instance_id} {event} {request_id} {time.monotonic():.6f}\n"
        os.write(self._notes, line.encode())


def _held_back(send: Send) -> Send:
    return send if send.until == send.num_blocks else replace(send, until=0)
