"""The metrics of one router: names and labels."""

from __future__ import annotations

from kvxfer.metric_set import MetricSet


class Metrics:
    """The metrics of a router. `python -m kvxfer.cli.generated_docs` documents them."""

    def __init__(self) -> None:
        self.set = metrics = MetricSet("router")
        self.requests = metrics.counter(
            "kvxfer_router_requests_total",
            "Requests answered, by the status the answer began with; 499: the client had left.",
            "route",
            "status",
        )
        self.running = metrics.gauge("kvxfer_router_running", "Requests under way.")
        self.waiting = metrics.gauge(
            "kvxfer_router_waiting", "Requests under way that have no pair of workers yet."
        )
        self.unpaired = metrics.counter(
            "kvxfer_router_unpaired_total",
            "Attempts at one worker instead of a pair, by reason. no-pair: no pair of ready "
            "workers could serve the request; short-prompt: decode lacked little of the prompt.",
            "reason",
        )
        self.retries = metrics.counter(
            "kvxfer_router_retries_total",
            "Attempts after the first one, by the error of the previous attempt.",
            "code",
        )
        self.failures = metrics.counter(
            "kvxfer_router_failures_total",
            "Requests that ended with an error after all attempts, by its code.",
            "code",
        )
        self.failed_streams = metrics.counter(
            "kvxfer_router_failed_streams_total",
            "Streams that ended with an error after their first token.",
            "code",
        )
        self.continued_streams = metrics.counter(
            "kvxfer_router_continued_streams_total",
            "Streams whose decode worker was lost and that went on at another one.",
        )
        self.aborted = metrics.counter(
            "kvxfer_router_aborted_total", "Requests whose client left, or stopped reading."
        )
        self.first_token = metrics.histogram(
            "kvxfer_router_time_to_first_token_seconds",
            "Time from the arrival of a request for a stream to its first token, in all attempts.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.tokenized = metrics.counter(
            "kvxfer_router_tokenized_total",
            "Prompts of text, by how their tokens became known: rendered by a worker (chats), "
            "cached, asked of a worker, late (the request went on without them), failed.",
            "outcome",
        )
        self.inter_token = metrics.histogram(
            "kvxfer_router_inter_token_seconds",
            "Time between two tokens of a stream, as seen by a client that keeps up.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5),
        )

    def render(self) -> bytes:
        return self.set.render()
