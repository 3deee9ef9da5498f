"""The metrics of one application: names, labels, and how they are measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http import HTTPMethod
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.errors import DeadlineExceeded, KvxferError
from kvxfer.scaling import ScalePlan
from kvxfer.scheduler.registry import Statistics, TransferEnd

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_METHODS: Final = frozenset(HTTPMethod)


class Metrics:
    """Every metric has its home here; docs/api.md lists them."""

    def __init__(self) -> None:
        self._collectors = CollectorRegistry()
        self._fleet = _Fleet()
        self._collectors.register(self._fleet)
        self.requests = Counter(
            "kvxfer_http_requests",
            "HTTP requests answered.",
            ("method", "route", "status"),
            registry=self._collectors,
        )
        self.request_seconds = Histogram(
            "kvxfer_http_request_seconds",
            "Seconds from a request's arrival to the start of its answer.",
            ("method", "route"),
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
            registry=self._collectors,
        )
        self.errors = Counter(
            "kvxfer_http_errors",
            "Problem documents sent, by their code.",
            ("code",),
            registry=self._collectors,
        )
        self.heartbeats = Counter("kvxfer_heartbeats", "Leases renewed.", registry=self._collectors)
        self.watchers = Gauge(
            "kvxfer_watchers", "Watches that are open now.", registry=self._collectors
        )
        self._stale = Gauge(
            "kvxfer_registry_stale_seconds",
            "Seconds since the registry was last heard of; 0 while it is there.",
            registry=self._collectors,
        )

        self.scale_wanted = Gauge(
            "kvxfer_scale_wanted_workers",
            "Workers that the last decision wants.",
            ("role",),
            registry=self._collectors,
        )
        self.scale_current = Gauge(
            "kvxfer_scale_current_workers",
            "Workers that there were or that were asked for at the last decision.",
            ("role",),
            registry=self._collectors,
        )
        self.scale_decisions = Counter(
            "kvxfer_scale_decisions",
            "Decisions of this replica, whether or not it leads.",
            ("role", "direction"),
            registry=self._collectors,
        )
        self.scale_failures = Counter(
            "kvxfer_scale_failures",
            "Rounds of the autoscaler that failed, by the code of the error.",
            ("code",),
            registry=self._collectors,
        )
        self.scale_leader = Gauge(
            "kvxfer_scale_leader",
            "1 where this replica applies its decisions.",
            registry=self._collectors,
        )

    def note_scaling(self, plan: ScalePlan) -> None:
        """A round of the autoscaler that went well."""
        self.scale_leader.set(plan.leads)
        for decision in (plan.prefill, plan.decode):
            self.scale_wanted.labels(decision.role).set(decision.wanted)
            self.scale_current.labels(decision.role).set(decision.current)
            self.scale_decisions.labels(decision.role, decision.direction).inc()

    def note_scaling_failure(self, error: KvxferError | TimeoutError) -> None:
        code = error.code if isinstance(error, KvxferError) else DeadlineExceeded.code
        self.scale_leader.set(0)
        self.scale_failures.labels(code).inc()

    def render(self, fleet: Statistics, stale_seconds: float | None) -> bytes:
        """The exposition in the Prometheus text format, with the fleet as it is now."""
        self._fleet.now = fleet
        self._stale.set(stale_seconds or 0)
        return generate_latest(self._collectors)


class _Fleet(Collector):
    """Metrics read off the registry, which counts for all replicas that share it."""

    def __init__(self) -> None:
        self.now: Statistics | None = None

    def collect(self) -> Iterator[Metric]:
        fleet = self.now
        if fleet is None:
            return
        instances = GaugeMetricFamily(
            "kvxfer_instances", "Live instances.", labels=("role", "state")
        )
        for (role, state), count in sorted(fleet.instances.items()):
            instances.add_metric((role, state), count)
        yield instances
        yield GaugeMetricFamily(
            "kvxfer_transfers_open", "Transfers that hold a reservation.", fleet.open_transfers
        )
        yield CounterMetricFamily("kvxfer_registrations", "Leases begun.", fleet.registrations)
        yield CounterMetricFamily(
            "kvxfer_leases_expired", "Leases ended for lack of a heartbeat.", fleet.leases_expired
        )
        yield CounterMetricFamily(
            "kvxfer_transfers_opened", "Transfers opened.", fleet.transfers_opened
        )
        ended = CounterMetricFamily(
            "kvxfer_transfers_ended", "Transfers ended, by why.", labels=("reason",)
        )
        for reason in TransferEnd:
            ended.add_metric((reason,), fleet.transfers_ended.get(reason, 0))
        yield ended


class MeasureRequests:
    """ASGI middleware that counts and times requests by route template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status: int | None = None

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._note(scope, status, time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            if status is None:
                self._note(scope, 500, time.perf_counter() - began)
            raise

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # Labels come from a fixed set: whoever scans paths or makes up methods grows nothing.
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        found = self._children.get((method, route, status))
        if found is None:
            found = self._children[method, route, status] = (
                self._metrics.requests.labels(method, route, str(status)),
                self._metrics.request_seconds.labels(method, route),
            )
        count, histogram = found
        count.inc()
        histogram.observe(seconds)
