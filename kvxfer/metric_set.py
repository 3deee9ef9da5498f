"""The metrics of one process. They are all made here, so docs/metrics.md can be generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvxfer.version import __version__

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Samples: TypeAlias = Mapping[Any, float]
"""Values by label values, which are tuples of strings."""

_UNITS: Final = ("seconds", "bytes", "blocks")


@dataclass(frozen=True, slots=True)
class Family:
    """The description of a metric for operators. `name` is the one in the exposition."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The last word of the name, by Prometheus' conventions; empty for a plain number."""
        word = self.name.removesuffix("_total").rpartition("_")[2]
        return word if word in _UNITS else ""

    @property
    def base(self) -> str:
        """The name for Prometheus' library, which adds _total to counters itself."""
        return self.name.removesuffix("_total")


class MetricSet(Collector):
    """The metrics of a process, and their text form. Label values come from fixed sets, never from
    a client or a peer."""

    def __init__(self, component: str) -> None:
        self.families: list[Family] = []
        self._registry = CollectorRegistry()
        # During an upgrade a fleet has two versions.
        self.gauge(
            "kvxfer_build_info", "1, with the version of kvxfer that runs.", "component", "version"
        ).labels(component, __version__).set(1)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        family = self._note(Family(name, "counter", text, labels))
        return Counter(family.base, text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        self._note(Family(name, "gauge", text, labels))
        return Gauge(name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        self._note(Family(name, "histogram", text, labels))
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets)

    def read(
        self,
        kind: Literal["counter", "gauge"],
        name: str,
        text: str,
        *labels: str,
        samples: Callable[[], Samples],
    ) -> None:
        """Adds a metric whose samples are read elsewhere at each scrape."""
        family = Family(name, kind, text, labels)

        def collect() -> Metric:
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            metric = make(family.base, text, labels=labels)
            for values, value in sorted(samples().items()):
                metric.add_metric(values, value)
            return metric

        self.add(family, collect)

    def add(self, family: Family, collect: Callable[[], Metric]) -> None:
        """Adds a metric whose samples `collect` makes at each scrape."""
        self._note(family)
        self._registry.register(_Read(collect))

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, without the times at which counters and histograms began, which would
        be one more series for each."""
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric

    def describe(self) -> list[Metric]:
        """Returns nothing, so that nothing is read before the first scrape."""
        return []

    def render(self) -> bytes:
        """Returns the metrics in the Prometheus text format."""
        return generate_latest(cast(CollectorRegistry, self))

    def _note(self, family: Family) -> Family:
        self.families.append(family)
        return family


class _Read(Collector):
    def __init__(self, collect: Callable[[], Metric]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        yield self._collect()

    def describe(self) -> list[Metric]:
        return []
