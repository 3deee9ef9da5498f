"""Transfers in vLLM's own metrics: from the worker side through vLLM's scheduler to Prometheus, and
to the line that vLLM logs every 10 s."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvxfer.connectors.vllm import metrics
from kvxfer.connectors.vllm.ended import DELIVERED, Ended
from kvxfer.errors import ChecksumMismatch
from kvxfer.metric_set import Family

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class TransferStats(KVConnectorStats):
    """The transfers that ended since the last step. Lists of plain values: vLLM sends them between
    processes."""

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__({"ended": list(data["ended"]) if data else []})

    @classmethod
    def of(cls, ended: Iterable[Ended]) -> TransferStats:
        return cls({"ended": [list(one) for one in ended]})

    def reset(self) -> None:
        self.data = {"ended": []}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        self.data["ended"] += other.data["ended"]
        return self

    def is_empty(self) -> bool:
        return not self.data["ended"]

    def reduce(self) -> dict[str, int | float]:
        """Returns the summary that vLLM logs."""
        ended = ended_in(self.data)
        summary: dict[str, int | float] = {}
        for direction in ("send", "receive"):
            good = [one for one in ended if (one.direction, one.outcome) == (direction, DELIVERED)]
            if good:
                mebibytes = sum(one.nbytes for one in good) / 2**20
                summary[f"{direction}: transfers"] = len(good)
                summary[f"{direction}: MiB"] = round(mebibytes, 1)
                summary[f"{direction}: mean ms"] = round(
                    sum(one.seconds for one in good) / len(good) * 1e3, 1
                )
        failed = collections.Counter(
            (one.direction, one.outcome) for one in ended if one.outcome != DELIVERED
        )
        for (direction, code), number in sorted(failed.items()):
            summary[f"{direction}: {code}"] = number
        return summary


class TransferMetrics(KVConnectorPromMetrics):
    """The metrics `vllm:kvxfer_*`. vLLM itself unregisters metrics with its prefix."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(kind: type[Any], family: Family, **more: Any) -> Any:
            labels = [*labelnames, *family.labels]
            return kind(name=family.base, documentation=family.text, labelnames=labels, **more)

        self._transfers = made(self._counter_cls, metrics.TRANSFERS)
        self._bytes = made(self._counter_cls, metrics.NBYTES)
        self._blocks = made(self._counter_cls, metrics.BLOCKS)
        self._seconds = made(self._histogram_cls, metrics.SECONDS, buckets=_BUCKETS)
        for engine in per_engine_labelvalues.values():  # present from the start, for an alert
            self._transfers.labels(*engine, "receive", ChecksumMismatch.code)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for one in ended_in(transfer_stats_data):
            labels = [*engine, one.direction]
            self._transfers.labels(*labels, one.outcome).inc()
            if one.outcome == DELIVERED:
                self._bytes.labels(*labels).inc(one.nbytes)
                self._blocks.labels(*labels).inc(one.blocks)
                self._seconds.labels(*labels).observe(one.seconds)


def ended_in(data: Mapping[str, Sequence[Sequence[Any]]]) -> list[Ended]:
    return [Ended(*values) for values in data["ended"]]
