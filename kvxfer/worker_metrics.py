"""A worker's engine and endpoint in Prometheus' format: what moved, and what was refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvxfer.engine import Engine
    from kvxfer.kv.endpoint import KvEndpoint


class WorkerMetrics(Collector):
    """Register it with a registry, or take render(). Read off the engine at each scrape."""

    def __init__(self, engine: Engine, endpoint: KvEndpoint) -> None:
        self._engine = engine
        self._endpoint = endpoint

    def render(self) -> bytes:
        """The text of `GET /metrics`."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text in (
            ("bytes", "Payload bytes of writes that were delivered (sent) or placed (received)."),
            ("writes", "Writes that were delivered (sent) or placed (received)."),
        ):
            moved = CounterMetricFamily(f"kvxfer_engine_{name}", text, labels=["direction"])
            for direction in ("sent", "received"):
                moved.add_metric([direction], stats[f"{name}_{direction}"])
            yield moved
        yield GaugeMetricFamily("kvxfer_engine_peers", "Connected peers.", value=stats["peers"])
        refused = CounterMetricFamily(
            "kvxfer_refused",
            "What was refused, by the code of the error: connections that were not let in "
            "(handshake), peers cut off for what they did (peer), writes of peers (write), "
            "messages and offers of peers, tickets of requests.",
            labels=["what", "code"],
        )
        for what, by_code in {**self._engine.refusals(), **self._endpoint.refusals()}.items():
            for code, times in by_code.items():
                refused.add_metric([what, code], times)
        yield refused
