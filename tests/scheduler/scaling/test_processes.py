"""The process backend with real reference workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from kvxfer.client import ControlPlaneClient
from kvxfer.errors import NotLeader
from kvxfer.instances import Instance, InstanceState, Load, Reserved, Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.scaling.policy_file import ProcessesConfig
from kvxfer.scheduler.scaling.processes import ProcessBackend, leave_first
from verify.polling import eventually
from verify.processes.control_plane import CLUSTER_KEY, RunningControlPlane

from .test_measurements import instance

READY = InstanceState.READY
ARGUMENTS = ("--blocks", "64", "--threads", "1", "--fabrics", "tcp")
START_SECONDS = 90.0


async def leads() -> None:
    """Permits every step."""


async def until(
    control_plane: ControlPlaneClient, holds: Callable[[tuple[Instance, ...]], bool]
) -> tuple[Instance, ...]:
    """Waits until the fleet is as wanted, and returns it."""

    async def found() -> list[tuple[Instance, ...]]:
        fleet = await control_plane.instances()
        return [fleet] if holds(fleet) else []

    (fleet,) = await eventually(found, START_SECONDS)
    return fleet


@asynccontextmanager
async def backend_on(
    plane: RunningControlPlane, monkeypatch: pytest.MonkeyPatch, **config: float
) -> AsyncIterator[ProcessBackend]:
    """Yields a backend that calls the registry on this loop. The control plane's loop calls it too:
    an embedded registry awaits nothing inside a step, and the tests make one call at a time."""
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", CLUSTER_KEY.decode())
    backend = ProcessBackend(
        plane.registry, ProcessesConfig(arguments=ARGUMENTS, **config), control_plane=plane.url
    )
    try:
        yield backend
    finally:
        await backend.close()


@pytest.mark.native
async def test_workers_start_drain_and_stop(monkeypatch):
    with RunningControlPlane(lease_seconds=3) as plane:
        async with backend_on(plane, monkeypatch) as backend, ControlPlaneClient(plane.url) as cp:
            await backend.scale(Role.PREFILL, 1, leads)
            await backend.scale(Role.DECODE, 2, leads)
            assert await backend.requested(Role.DECODE) == 2, "requested, not yet registered"
            fleet = await until(cp, lambda f: [i.state for i in f] == [READY] * 3)
            assert sorted(i.role for i in fleet) == ["decode", "decode", "prefill"]

            # One of the two decode workers has an open transfer.
            opened = await cp.open_transfer()
            busy = opened.decode.instance_id
            await backend.scale(Role.DECODE, 1, leads)
            fleet = await until(cp, lambda f: len(f) == 2)
            assert busy in [i.instance_id for i in fleet], "the idle one has left"

            await backend.scale(Role.DECODE, 0, leads)
            assert await backend.requested(Role.DECODE) == 0
            for _ in range(3):  # heartbeats report no request, but the transfer is open
                beaten = (await cp.instance(busy)).heartbeat_at
                await until(cp, lambda f, beaten=beaten: heartbeat_of(busy, f) > beaten)
            assert (await cp.instance(busy)).state is InstanceState.DRAINING

            await cp.release_transfer(opened.transfer_id)
            (last,) = await until(cp, lambda f: len(f) == 1)
            assert last.role is Role.PREFILL
        async with httpx2.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx2.ConnectError):
                await http.get(f"{last.http_address}/healthz")


def heartbeat_of(instance_id: str, fleet: tuple[Instance, ...]) -> float:
    (heartbeat_at,) = [i.heartbeat_at for i in fleet if i.instance_id == instance_id]
    return heartbeat_at


@pytest.mark.native
async def test_worker_that_does_not_drain_in_time_is_stopped(monkeypatch):
    with RunningControlPlane(lease_seconds=3) as plane:
        async with (
            backend_on(plane, monkeypatch, drain_seconds=0.5) as backend,
            ControlPlaneClient(plane.url) as cp,
        ):
            await backend.scale(Role.PREFILL, 1, leads)
            await backend.scale(Role.DECODE, 1, leads)
            await until(cp, lambda f: [i.state for i in f] == [READY] * 2)
            await cp.open_transfer()
            await backend.scale(Role.DECODE, 0, leads)
            fleet = await until(cp, lambda f: len(f) == 1)
            assert fleet[0].role is Role.PREFILL


@pytest.mark.realtime
async def test_worker_that_dies_is_not_counted_and_the_next_decision_replaces_it(monkeypatch):
    with RunningControlPlane(lease_seconds=1) as plane:
        async with backend_on(plane, monkeypatch) as backend, ControlPlaneClient(plane.url) as cp:
            await backend.scale(Role.DECODE, 1, leads)
            (first,) = await until(cp, lambda f: [i.state for i in f] == [READY])
            os.kill(pid_of(first.instance_id), 9)
            await until(cp, lambda f: not f)

            async def not_counted() -> bool:
                return await backend.requested(Role.DECODE) == 0

            await eventually(not_counted)
            await backend.scale(Role.DECODE, 1, leads)
            (second,) = await until(cp, lambda f: [i.state for i in f] == [READY])
            assert second.instance_id != first.instance_id


def pid_of(instance_id: str) -> int:
    """Returns the id of the process that was started for the instance."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            if instance_id.encode() in file.read_bytes().split(b"\0"):
                return int(file.parent.name)
    raise AssertionError(f"no process of {instance_id}")


@pytest.mark.native
async def test_worker_that_cannot_start_is_logged_and_not_counted(monkeypatch, caplog):
    registry = EmbeddedRegistry()
    backend = ProcessBackend(
        registry,
        ProcessesConfig(arguments=("--fabrics", "carrier-pigeon")),
        control_plane="http://127.0.0.1:1",
    )
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", CLUSTER_KEY.decode())
    await backend.scale(Role.PREFILL, 1, leads)
    (task,) = [worker.task for worker in backend._workers]
    assert task is not None
    await task
    assert await backend.requested(Role.PREFILL) == 0
    assert "carrier-pigeon" in caplog.text
    await backend.close()


async def test_deposed_leader_neither_starts_nor_stops():
    async def deposed() -> None:
        raise NotLeader("token 1 no longer leads")

    backend = ProcessBackend(
        EmbeddedRegistry(), ProcessesConfig(), control_plane="http://127.0.0.1:1"
    )
    with pytest.raises(NotLeader):
        await backend.scale(Role.PREFILL, 3, deposed)
    assert await backend.requested(Role.PREFILL) == 0


def test_the_least_busy_workers_leave_first():
    fleet = {
        "busy": instance("busy", "decode", load=Load(running=2)),
        "reserved": instance("reserved", "decode", reserved=Reserved(transfers=1)),
        "idle": instance("idle", "decode"),
    }
    assert leave_first(["busy", "reserved", "idle", "starting"], fleet) == [
        "starting",
        "idle",
        "reserved",
        "busy",
    ]
