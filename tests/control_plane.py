"""What the tests of registry, API and client share: a clock that is moved, workers, a server."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvxfer.errors import KvxferError
from kvxfer.instances import InstanceSpec, Role
from kvxfer.kv.layout import KvLayout

if TYPE_CHECKING:
    from kvxfer.scheduler.registry import Registry

T = TypeVar("T")

# For what comes at once where the machine has nothing else to do.
PATIENCE = 30.0

CLUSTER_KEY = b"cluster key of the tests"
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_size=8, dtype="float32", block_size=16)


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, unix: float = 1_800_000_000.0) -> None:
        self._unix = unix
        self._passed = 0.0

    def advance(self, seconds: float) -> None:
        self._passed += seconds

    def monotonic(self) -> float:
        return 50.0 + self._passed

    def unix(self) -> float:
        return self._unix + self._passed


def worker(instance_id: str, role: Role | str = Role.PREFILL, **changes: Any) -> InstanceSpec:
    """A worker as it would register, with what is changed about it."""
    layout = {
        name: changes.pop(name) for name in ("block_size", "dtype", "order") if name in changes
    }
    spec = InstanceSpec(
        instance_id=instance_id,
        role=Role(role),
        model="llama",
        engine_address=f"kvx://127.0.0.1:7400/{instance_id}",
        http_address="http://127.0.0.1:8000",
        layout=replace(LAYOUT, **layout),
        num_blocks=64,
    )
    return msgspec.structs.replace(spec, **changes)


async def eventually(step: Callable[[], T | Awaitable[T]]) -> T:
    """The answer of `step` once it gives one that is neither an error nor false."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(KvxferError):
                answer = step()
                if inspect.isawaitable(answer):
                    answer = await answer
                if answer:
                    return answer
            await asyncio.sleep(0.02)


class RunningControlPlane:
    """`kvxfer serve` in a thread of this process, so that a test can hold its clock."""

    def __init__(
        self,
        *,
        port: int = 0,
        lease_seconds: float = 6.0,
        clock: FakeClock | None = None,
        registry: Registry | None = None,
        tls: Any = None,
        **settings: Any,
    ) -> None:
        from kvxfer.api.app import create_app
        from kvxfer.api.server import ControlPlaneServer
        from kvxfer.api.settings import Settings
        from kvxfer.http_listener import bind, url_of
        from kvxfer.scheduler.embedded import EmbeddedRegistry
        from kvxfer.scheduler.registry import LeasePolicy

        self.registry = registry or EmbeddedRegistry(LeasePolicy(lease_seconds), clock=clock)
        app = create_app(
            Settings(cluster_key=CLUSTER_KEY, sweep_seconds=0.02, **settings),
            self.registry,
            clock=clock,
        )
        listener = bind("127.0.0.1", port)
        self.url = url_of(listener, tls=tls is not None)
        self.port = listener.getsockname()[1]
        self._accepts = threading.Event()
        self._server = ControlPlaneServer(app, listener, lambda _: self._accepts.set(), tls=tls)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> RunningControlPlane:
        self._thread.start()
        assert self._accepts.wait(20), "the control plane did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the control plane did not stop"
