"""The processes: control plane, two routers, a producer and a consumer. Each can be killed, frozen
and started again."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from verify.polling import eventually
from verify.processes.fleet import Fleet
from verify.processes.programs import Server
from verify.processes.vllm.servers import add_vllm

LEASE_SECONDS: Final = 10.0
ENGINES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
_WHOLE_SECONDS: Final = 480.0
_IDLE_SECONDS: Final = LEASE_SECONDS + 10.0
_POLL_SECONDS: Final = 0.1
_USAGE: Final = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


class Cluster(Fleet):
    """The cluster's processes. Synchronous methods block: event loops call them in a thread."""

    def __init__(self, folder: Path, model: Path, policy: str, attempts: int) -> None:
        super().__init__(folder)
        self._model, self._policy, self._attempts = model, policy, attempts

    def start_all(self) -> None:
        self.start_control_plane()
        for name in ENGINES:
            self.start_engine(name)
        self.start_router(
            *("--attempts", str(self._attempts), "--capacity-seconds", "0.5"),
            *("--first-token-seconds", "20", "--token-seconds", "20"),
        )
        self.start_router(name="usual-router")

    @property
    def usual_router(self) -> Server:
        """A router with default settings, which retries failures."""
        return self.running["usual-router"]

    @property
    def logs(self) -> list[Path]:
        return [self.running[name].log for name in ENGINES]

    def start_engine(self, name: str) -> None:
        """Starts an engine. Returns before it is ready; settled() waits for that."""
        # Long prompts are computed in chunks.
        chunks = ("--max-num-batched-tokens", "600") if name == "prefill" else ()
        add_vllm(
            *(self, name, self._model, *chunks),
            role=ENGINES[name],
            policy=self._policy,
            lease_seconds=LEASE_SECONDS,
        )

    async def settled(self) -> None:
        """Waits until the control plane reports the current processes of both engines as ready."""
        await eventually(lambda: asyncio.to_thread(self.whole), _WHOLE_SECONDS, pause=_POLL_SECONDS)

    async def leaks(self) -> list[str]:
        """Returns what idle engines still hold after all leases have ended, in words."""

        async def nothing() -> bool:
            return not await asyncio.to_thread(self._held)

        with contextlib.suppress(TimeoutError):
            await eventually(nothing, _IDLE_SECONDS, pause=_POLL_SECONDS)
        return await asyncio.to_thread(self._held)

    def _held(self) -> list[str]:
        held = [
            f"{name}: {metric} is {value:g}"
            for name, server in self.workers.items()
            for metric in _USAGE
            if (value := server.metric(metric))
        ]
        if transfers := self.client.transfers():
            held.append(f"control plane: {len(transfers)} reservations")
        return held
