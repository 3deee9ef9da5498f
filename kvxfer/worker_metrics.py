"""The metrics of a worker's engine and endpoint for Prometheus: moved, failed, refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvxfer.errors import AuthenticationFailed, TicketInvalid, UnknownRegion
from kvxfer.kv.counts import SECONDS
from kvxfer.metric_set import Family, MetricSet, Samples

if TYPE_CHECKING:
    from kvxfer.engine import Engine
    from kvxfer.kv.endpoint import KvEndpoint

_TRANSFER_SECONDS = Family(
    "kvxfer_kv_transfer_seconds",
    "histogram",
    "Time of a delivered KV transfer from the session's start to its last byte, including the wait "
    "for the other side.",
    ("direction",),
)


# Alerts watch these series, so they exist from the start: one that begins at 1 has not increased.
_WATCHED: Final = (
    ("handshake", AuthenticationFailed.code),
    ("write", UnknownRegion.code),
    ("ticket", TicketInvalid.code),
)


class WorkerMetrics(Collector):
    """The metrics of a worker, read from the engine at each scrape. Register it with a registry, or
    call render()."""

    def __init__(self, engine: Engine, endpoint: KvEndpoint) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self.set = MetricSet("worker")
        self._read_engine()
        self._read_transfers()

    def render(self) -> bytes:
        """Returns the text of `GET /metrics`."""
        return self.set.render()

    def collect(self) -> Iterator[Metric]:
        return self.set.collect()

    def describe(self) -> list[Metric]:
        return []

    def _read_engine(self) -> None:
        read = self.set.read
        read(
            "counter",
            "kvxfer_engine_bytes_total",
            "Payload bytes of writes that were delivered (sent) or placed (received).",
            "direction",
            samples=lambda: self._moved("bytes"),
        )
        read(
            "counter",
            "kvxfer_engine_staged_bytes_total",
            "Payload bytes delivered from a GPU through host memory.",
            samples=lambda: {(): self._engine.stats()["bytes_staged"]},
        )
        read(
            "counter",
            "kvxfer_engine_writes_total",
            "Writes that were delivered (sent) or placed (received).",
            "direction",
            samples=lambda: self._moved("writes"),
        )
        read(
            "gauge",
            "kvxfer_engine_peers",
            "Connected peers.",
            samples=lambda: {(): self._engine.stats()["peers"]},
        )
        read(
            "counter",
            "kvxfer_peers_lost_total",
            "Lost peers, by cause: their connection ended (peer-lost), they were silent for "
            "peer_timeout (peer-timeout), no NIC was left (nic-lost).",
            "code",
            samples=lambda: {(c,): n for c, n in self._endpoint.counts.lost_peers.items()},
        )
        read(
            "counter",
            "kvxfer_refused_total",
            "Refusals by the code of the error: connections that were not accepted (handshake), "
            "peers that were disconnected for what they did (peer), writes of peers (write), "
            "messages and offers of peers, tickets of requests.",
            "what",
            "code",
            samples=self._refused,
        )

    def _read_transfers(self) -> None:
        read = self.set.read
        read(
            "counter",
            "kvxfer_kv_transfers_total",
            "KV transfers that ended, by direction (send, receive) and outcome: delivered, or the "
            "code of the error, among them checksum-mismatch, lease-expired and peer-lost.",
            "direction",
            "outcome",
            samples=lambda: self._endpoint.counts.ended,
        )
        read(
            "counter",
            "kvxfer_kv_transfer_bytes_total",
            "Bytes of KV cache in transfers that were delivered, by fabric.",
            "direction",
            "fabric",
            samples=lambda: self._endpoint.counts.nbytes,
        )
        self.set.add(_TRANSFER_SECONDS, self._durations)
        read(
            "gauge",
            "kvxfer_kv_transfers_running",
            "KV transfers that have begun and not ended.",
            "direction",
            samples=lambda: {(way,): n for way, n in self._endpoint.running().items()},
        )
        read(
            "counter",
            "kvxfer_kv_checked_bytes_total",
            "Bytes that were compared with their checksum before decode used them.",
            samples=lambda: {(): self._endpoint.counts.checked_bytes},
        )
        read(
            "gauge",
            "kvxfer_kv_blocks",
            "KV blocks of the pool by state: free, offered, receiving, complete, held; none if the "
            "inference engine has its own pool.",
            "state",
            samples=lambda: {
                (state.name.lower(),): number for state, number in self._endpoint.blocks().items()
            },
        )

    def _moved(self, what: str) -> Samples:
        stats = self._engine.stats()
        return {(way,): stats[f"{what}_{way}"] for way in ("sent", "received")}

    def _refused(self) -> Samples:
        refused = {**self._engine.refusals(), **self._endpoint.refusals()}
        counted = {(what, c): n for what, by_code in refused.items() for c, n in by_code.items()}
        return {**dict.fromkeys(_WATCHED, 0), **counted}

    def _durations(self) -> Metric:
        family = HistogramMetricFamily(
            _TRANSFER_SECONDS.name, _TRANSFER_SECONDS.text, labels=_TRANSFER_SECONDS.labels
        )
        for direction, durations in self._endpoint.counts.seconds.items():
            ends = [*map(str, SECONDS), "+Inf"]
            buckets = list(zip(ends, map(float, accumulate(durations.buckets)), strict=True))
            family.add_metric([direction], buckets, durations.sum)
        return family
