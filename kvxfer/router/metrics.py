"""The metrics of one router: names and labels. docs/router.md lists them."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)


class Metrics:
    """Labels come from fixed sets: nothing that a client makes up becomes one."""

    def __init__(self) -> None:
        self._collectors = CollectorRegistry()
        self.requests = Counter(
            "kvxfer_router_requests",
            "Requests answered, by the status that the answer began with.",
            ("route", "status"),
            registry=self._collectors,
        )
        self.running = Gauge(
            "kvxfer_router_running", "Requests under way.", registry=self._collectors
        )
        self.retries = Counter(
            "kvxfer_router_retries",
            "Attempts after the first one, by the error of the one before.",
            ("code",),
            registry=self._collectors,
        )
        self.failed_streams = Counter(
            "kvxfer_router_failed_streams",
            "Streams that ended with an error after their first token.",
            ("code",),
            registry=self._collectors,
        )
        self.aborted = Counter(
            "kvxfer_router_aborted",
            "Requests whose client left, or stopped reading.",
            registry=self._collectors,
        )
        self.first_token = Histogram(
            "kvxfer_router_time_to_first_token_seconds",
            "From a request's arrival to its first token, with all attempts.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self._collectors,
        )
        self.inter_token = Histogram(
            "kvxfer_router_inter_token_seconds",
            "Between two tokens, as a client that keeps up sees them.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5),
            registry=self._collectors,
        )

    def render(self) -> bytes:
        return generate_latest(self._collectors)
