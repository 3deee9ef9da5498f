"""The processes: control plane, router, a producer and a consumer, each of which can be killed,
frozen and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any, Final, Self

import httpx

from tests.vllm.servers import Server, free_port, kvxfer_at, vllm

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


class Cluster:
    """Loop only; use it inside `async with`. No process is left behind."""

    def __init__(self, folder: Path, model: Path, policy: str, attempts: int) -> None:
        self._folder, self._model, self._policy = folder, model, policy
        self._attempts = attempts
        self._stack = contextlib.ExitStack()
        self._http = httpx.AsyncClient(trust_env=False, timeout=5.0)
        self._control_plane_port = free_port()
        self.engines: dict[str, Server] = {}
        self.control_plane: Server
        self.router: Server

    async def __aenter__(self) -> Self:
        try:
            await self.start_control_plane()
            for name in ENGINES:
                await self.start_engine(name)
            self.router = self._stack.enter_context(
                kvxfer_at(
                    *("router", self._folder, free_port(), "router", "--allow-anonymous"),
                    *("--control-plane", self.control_plane.url),
                    *("--attempts", str(self._attempts), "--capacity-seconds", "0.5"),
                    *("--first-token-seconds", "20", "--token-seconds", "20"),
                )
            )
            await asyncio.to_thread(self.router.wait, "/healthz")
            await self.whole()
        except BaseException:
            self._stack.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await asyncio.to_thread(self._stack.close)

    @property
    def logs(self) -> list[Path]:
        return [self._folder / f"{name}.log" for name in ENGINES]

    async def start_control_plane(self) -> None:
        # A process that is being made would hold up the loop that measures times.
        self.control_plane = await asyncio.to_thread(
            self._stack.enter_context,
            kvxfer_at(
                *("control-plane", self._folder, self._control_plane_port),
                *("serve", "--allow-anonymous"),
            ),
        )
        await asyncio.to_thread(self.control_plane.wait, "/healthz")

    async def start_engine(self, name: str) -> None:
        """Returns before it is ready; whole() waits for that."""
        transfer: dict[str, Any] = {
            "kv_role": ENGINES[name],
            "kv_load_failure_policy": self._policy,
            "kv_connector_extra_config": {
                "control_plane": self.control_plane.url,
                "lease_seconds": LEASE_SECONDS,
            },
        }
        # Long prompts are computed in chunks.
        chunks = ("--max-num-batched-tokens", "600") if name == "prefill" else ()
        self.engines[name] = await asyncio.to_thread(
            self._stack.enter_context,
            vllm(name, self._folder, self._model, *chunks, transfer=transfer),
        )

    def freeze(self, name: str) -> None:
        os.killpg(self.engines[name].process.pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        os.killpg(self.engines[name].process.pid, signal.SIGCONT)

    async def whole(self) -> None:
        """Waits until the control plane knows both engines, as they are now, as ready."""
        addresses = {server.url for server in self.engines.values()}
        give_up = time.monotonic() + _WHOLE_SECONDS
        while True:
            fleet: list[dict[str, Any]] = []
            with contextlib.suppress(httpx.HTTPError):
                fleet = (await self._get(self.control_plane, "/v1/instances")).json()["instances"]
            if {each["http_address"] for each in fleet if each["state"] == "ready"} == addresses:
                return
            for server in self.engines.values():
                if server.process.poll() is not None:
                    raise AssertionError(f"{server.name} has ended:\n{server.tail()}")
            if time.monotonic() > give_up:
                raise AssertionError(f"after {_WHOLE_SECONDS:g} s the fleet is {fleet}")
            await asyncio.sleep(_POLL_SECONDS)

    async def leaks(self) -> list[str]:
        """What idle engines still hold after every lease is over, in words."""
        give_up = time.monotonic() + _IDLE_SECONDS
        while True:
            held = []
            for name, server in self.engines.items():
                values = await asyncio.to_thread(lambda s=server: [s.metric(m) for m in _USAGE])
                held += [
                    f"{name}: {metric} is {value:g}"
                    for metric, value in zip(_USAGE, values, strict=True)
                    if value
                ]
            transfers = (await self._get(self.control_plane, "/v1/transfers")).json()["transfers"]
            if transfers:
                held.append(f"control plane: {len(transfers)} reservations")
            if not held or time.monotonic() > give_up:
                return held
            await asyncio.sleep(_POLL_SECONDS)

    async def _get(self, server: Server, path: str) -> httpx.Response:
        return await self._http.get(server.url + path)
