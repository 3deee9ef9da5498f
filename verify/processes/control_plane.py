"""A control plane in a thread of this process, and specs of workers to register with it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.instances import InstanceSpec, Role
from kvxfer.layout import KvLayout
from verify.polling import PATIENCE

if TYPE_CHECKING:
    from kvxfer.scheduler.registry import Registry

CLUSTER_KEY = b"cluster key of the tests"
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_size=8, dtype="float32", block_size=16)


def worker(instance_id: str, role: Role | str = Role.PREFILL, **changes: Any) -> InstanceSpec:
    """Returns the spec that a worker registers; the arguments replace its fields."""
    layout = {
        name: changes.pop(name) for name in ("block_size", "dtype", "order") if name in changes
    }
    spec = InstanceSpec(
        instance_id=instance_id,
        role=Role(role),
        model="llama",
        engine_address=f"kvx://127.0.0.1:1/{instance_id}",
        http_address="http://127.0.0.1:9",
        layout=replace(LAYOUT, **layout),
        num_blocks=64,
    )
    return msgspec.structs.replace(spec, **changes)


class RunningControlPlane:
    """`kvxfer serve` in a thread of this process, so that a test can control its clock."""

    def __init__(
        self,
        *,
        port: int = 0,
        lease_seconds: float = 6.0,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
        tls: Any = None,
        **settings: Any,
    ) -> None:
        from kvxfer.api.app import create_app
        from kvxfer.api.settings import Settings
        from kvxfer.scheduler.embedded import EmbeddedRegistry
        from kvxfer.scheduler.lease_policy import LeasePolicy
        from kvxfer.web.listener import bind, url_of
        from kvxfer.web.server import Server

        self.registry = registry or EmbeddedRegistry(LeasePolicy(lease_seconds), clock=clock)
        app = create_app(
            Settings(cluster_key=CLUSTER_KEY, **settings),
            self.registry,
            clock=clock,
            sweep_seconds=0.02,
        )
        listener = bind("127.0.0.1", port)
        self.url = url_of(listener, tls=tls is not None)
        self.port = listener.getsockname()[1]
        self._accepts = threading.Event()
        self._server = Server(app, listener, lambda _: self._accepts.set(), tls=tls)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> RunningControlPlane:
        self._thread.start()
        assert self._accepts.wait(PATIENCE), "the control plane did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
