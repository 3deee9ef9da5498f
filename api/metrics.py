"""The metrics of one control plane: names, labels, and how they are measured."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from http import HTTPMethod
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import DeadlineExceeded, KvxferError
from kvxfer.instances import Instance
from kvxfer.metric_set import MetricSet, Samples
from kvxfer.scaling import ScalePlan
from kvxfer.scheduler.registry import Statistics, TransferEnd
from kvxfer.scheduler.scaling.measurements import blocks_in_use
from kvxfer.scheduler.weight_updates import UpdateStep
from kvxfer.weight_updates import Decision, UpdateState

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_METHODS: Final = frozenset(HTTPMethod)
_NOBODY: Final = Statistics({}, 0, 0, 0, 0, 0, {}, {})
_ENDS: Final = (UpdateState.COMMITTED, UpdateState.ABORTED)
# Metrics with a label for the role.
_FLEET_LOAD: Final = {
    "requests_running": "Requests that live instances work on.",
    "requests_waiting": "Requests that wait in live instances.",
    "kv_blocks": "KV blocks of live instances.",
    "kv_used_blocks": "KV blocks of live instances that are in use or reserved.",
    "kv_cached_blocks": "KV blocks that the prefix caches of live instances hold.",
}


class Metrics:
    """Every metric of a control plane. `python -m kvxfer.cli.generated_docs` documents them."""

    def __init__(self) -> None:
        self.set = metrics = MetricSet("control-plane")
        self._fleet = _NOBODY
        self._load: dict[str, Samples] = {}
        self._versions: list[int] = []
        self._waiting: Mapping[str, int] = {}
        self._read_fleet()
        self._read_load()
        self.requests = metrics.counter(
            "kvxfer_http_requests_total", "HTTP requests answered.", "method", "route", "status"
        )
        self.request_seconds = metrics.histogram(
            "kvxfer_http_request_seconds",
            "Seconds from a request's arrival to the start of its answer.",
            "method",
            "route",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
        )
        self.errors = metrics.counter(
            "kvxfer_http_errors_total", "Problem documents sent, by their code.", "code"
        )
        self.heartbeats = metrics.counter("kvxfer_heartbeats_total", "Leases renewed.")
        metrics.read(
            "gauge",
            "kvxfer_transfers_waiting",
            "Requests that wait at this replica for a pair with room.",
            "tenant",
            samples=lambda: {(tenant,): count for tenant, count in self._waiting.items()},
        )
        self.watchers = metrics.gauge("kvxfer_watchers", "Watches that are open now.")
        self._stale = metrics.gauge(
            "kvxfer_registry_stale_seconds",
            "Seconds since the registry last answered; 0 while it is available.",
        )
        self.scale_wanted = metrics.gauge(
            "kvxfer_scale_wanted_workers", "Workers that the last decision wants.", "role"
        )
        self.scale_current = metrics.gauge(
            "kvxfer_scale_current_workers",
            "Workers at the last decision, requested or present.",
            "role",
        )
        self.scale_decisions = metrics.counter(
            "kvxfer_scale_decisions_total",
            "Decisions of this replica, whether or not it leads, by direction: up, down, hold.",
            "role",
            "direction",
        )
        self.scale_failures = metrics.counter(
            "kvxfer_scale_failures_total",
            "Rounds of the autoscaler that failed, by the code of the error.",
            "code",
        )
        self.scale_leader = metrics.gauge(
            "kvxfer_scale_leader", "1 if this replica applies its decisions."
        )

        self.staging_seconds = metrics.histogram(
            "kvxfer_weight_update_staging_seconds",
            "Time of a committed weight update from its announcement to the decision.",
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000),
        )
        self.pause_seconds = metrics.histogram(
            "kvxfer_weight_update_pause_seconds",
            "Pause of an instance that applied a weight update, from the last step before it to "
            "the first step after it.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100),
        )

    def note_update(self, step: UpdateStep) -> None:
        """Counts a step of a weight update that this replica took."""
        before, after = step
        if before is None:
            return
        if before.decision is None and after.decision is Decision.COMMIT and after.decided_at:
            self.staging_seconds.observe(max(after.decided_at - after.started_at, 0.0))
        for was, now in zip(before.instances, after.instances, strict=True):
            if was.pause_seconds is None and now.pause_seconds is not None:
                self.pause_seconds.observe(now.pause_seconds)

    def note_scaling(self, plan: ScalePlan) -> None:
        """Counts a round of the autoscaler that succeeded."""
        self.scale_leader.set(plan.leads)
        for decision in (plan.prefill, plan.decode):
            self.scale_wanted.labels(decision.role).set(decision.wanted)
            self.scale_current.labels(decision.role).set(decision.current)
            self.scale_decisions.labels(decision.role, decision.direction).inc()

    def note_scaling_failure(self, error: KvxferError | TimeoutError) -> None:
        code = error.code if isinstance(error, KvxferError) else DeadlineExceeded.code
        self.scale_leader.set(0)
        self.scale_failures.labels(code).inc()

    def render(
        self,
        fleet: Statistics,
        instances: Iterable[Instance],
        stale_seconds: float | None,
        waiting: Mapping[str, int],
    ) -> bytes:
        """Returns the exposition in the Prometheus text format, with the fleet as it is now.
        `waiting` has the number of requests of each tenant that wait here for a pair."""
        self._waiting = waiting
        self._fleet = fleet
        live = list(instances)
        self._load = _load(live)
        self._versions = [i.weights_version for i in live if i.weights_version is not None]
        self._stale.set(stale_seconds or 0)
        return self.set.render()

    def _read_fleet(self) -> None:
        """Adds the metrics that are read from the registry, for all replicas that share it."""
        read = self.set.read
        read(
            "gauge",
            "kvxfer_instances",
            "Live instances.",
            "role",
            "state",
            samples=lambda: self._fleet.instances,
        )
        read(
            "gauge",
            "kvxfer_transfers_open",
            "Transfers that hold a reservation.",
            samples=lambda: {(): self._fleet.open_transfers},
        )
        read(
            "counter",
            "kvxfer_registrations_total",
            "Leases begun.",
            samples=lambda: {(): self._fleet.registrations},
        )
        read(
            "counter",
            "kvxfer_leases_expired_total",
            "Leases that expired without a heartbeat.",
            samples=lambda: {(): self._fleet.leases_expired},
        )
        read(
            "counter",
            "kvxfer_leases_spared_total",
            "Leases extended once, because most leases of a fleet or of a zone were about to "
            "expire shortly after the registry was unavailable.",
            samples=lambda: {(): self._fleet.leases_spared},
        )
        read(
            "counter",
            "kvxfer_transfers_opened_total",
            "Transfers opened.",
            samples=lambda: {(): self._fleet.transfers_opened},
        )
        read(
            "counter",
            "kvxfer_transfers_ended_total",
            f"Transfers ended, by reason: {', '.join(TransferEnd)}.",
            "reason",
            samples=lambda: {
                (reason,): self._fleet.transfers_ended.get(reason, 0) for reason in TransferEnd
            },
        )

        read(
            "counter",
            "kvxfer_weight_updates_total",
            f"Weight updates ended, by outcome: {', '.join(_ENDS)}.",
            "outcome",
            samples=lambda: {(end,): self._fleet.updates_ended.get(end, 0) for end in _ENDS},
        )
        for name, text, pick in (
            ("oldest", "The lowest version of weights that a live instance serves.", min),
            ("newest", "The highest version of weights that a live instance serves.", max),
        ):
            read(
                "gauge",
                f"kvxfer_fleet_{name}_weights_version",
                text,
                samples=lambda pick=pick: {(): pick(self._versions)} if self._versions else {},  # type: ignore[misc]
            )

    def _read_load(self) -> None:
        """Adds the metrics that workers report with their heartbeats, whatever engine they run."""
        for name, text in _FLEET_LOAD.items():
            self.set.read(
                "gauge",
                f"kvxfer_fleet_{name}",
                text,
                "role",
                samples=lambda name=name: self._load.get(name, {}),  # type: ignore[misc]
            )


def _load(instances: Iterable[Instance]) -> dict[str, Samples]:
    found: dict[str, Tally[tuple[str, ...]]] = {name: Tally() for name in _FLEET_LOAD}
    for instance in instances:
        role = (instance.role.value,)
        found["requests_running"][role] += instance.load.running
        found["requests_waiting"][role] += instance.load.waiting
        found["kv_blocks"][role] += instance.num_blocks
        found["kv_used_blocks"][role] += blocks_in_use(instance)
        found["kv_cached_blocks"][role] += instance.load.cached_blocks or 0
    return {name: dict(tally) for name, tally in found.items()}


class MeasureRequests:
    """ASGI middleware that counts and times requests by route template."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = self._clock.monotonic()
        status: int | None = None

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._note(scope, status, self._clock.monotonic() - began)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            if status is None:
                self._note(scope, 500, self._clock.monotonic() - began)
            raise

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # Labels come from a fixed set: scanned paths and invented methods add none.
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
