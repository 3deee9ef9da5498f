"""The cost of tracing.

Times the control plane's busiest call, POST /v1/transfers, without HTTP: with tracing removed, with
an untraced request, and with a recorded one. Also times one traced step of code outside a trace.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from fastapi import FastAPI

from benchmarks.control.figures import TracedCall, TracingReport
from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.instances import InstanceState, Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.tracing.asgi import TraceRequests
from kvxfer.tracing.span import span
from verify.processes.control_plane import CLUSTER_KEY, worker

CALLS = 200
ROUNDS = 9
STEPS = 100_000
TAKEN_OUT = "tracing taken out"
RECORDED = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = json.dumps({"request_id": "r", "prompt_tokens": 16}).encode()


async def control_plane(*, traced: bool) -> FastAPI:
    registry = EmbeddedRegistry(LeasePolicy(3600))  # no lease ends while this runs
    for role in (Role.PREFILL, Role.DECODE):
        spec = worker(role.value, role, num_blocks=1 << 30)
        await registry.register(spec, state=InstanceState.READY)
    app = create_app(Settings(cluster_key=CLUSTER_KEY), registry)
    if not traced:
        kept = [each for each in app.user_middleware if each.cls is not TraceRequests]
        app.user_middleware[:] = kept
    return app


async def call(app: FastAPI, headers: list[tuple[bytes, bytes]]) -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/transfers",
        "raw_path": b"/v1/transfers",
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"kvxfer"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(BODY)).encode()),
            *headers,
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != 201:
            raise RuntimeError(f"the control plane answered {message['status']}")

    # A server gives each request its own context.
    await asyncio.create_task(app(scope, receive, send))


async def microseconds(app: FastAPI, headers: list[tuple[bytes, bytes]]) -> float:
    begun = time.process_time()
    for _ in range(CALLS):
        await call(app, headers)
    return (time.process_time() - begun) / CALLS * 1e6


async def measure_tracing() -> TracingReport:
    without, shipped = await control_plane(traced=False), await control_plane(traced=True)
    cases: dict[str, tuple[FastAPI, list[tuple[bytes, bytes]]]] = {
        TAKEN_OUT: (without, []),
        "untraced": (shipped, []),
        "recorded": (shipped, [(b"traceparent", RECORDED)]),
    }
    rounds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):  # in turn, so that other load disturbs all of them
        for name, case in cases.items():
            rounds[name].append(await microseconds(*case))
    least = {name: min(values) for name, values in rounds.items()}
    begun = time.process_time()
    for _ in range(STEPS):
        with span("nothing"):
            pass
    step = (time.process_time() - begun) / STEPS * 1e6
    return TracingReport(
        [TracedCall(name, value, value / least[TAKEN_OUT]) for name, value in least.items()], step
    )
