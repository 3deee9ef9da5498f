"""The metrics of one process: made in one place, which so knows what docs/metrics.md has to say."""

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
"""Values by the values of the labels: tuples of strings."""

_UNITS: Final = ("seconds", "bytes", "blocks")


@dataclass(frozen=True, slots=True)
class Family:
    """What an operator has to know of a metric. `name` is the one in the exposition."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """As Prometheus' conventions have it: the last word of the name; empty for a number."""
        word = self.name.removesuffix("_total").rpartition("_")[2]
        return word if word in _UNITS else ""

    @property
    def base(self) -> str:
        """What Prometheus' library calls it: it adds _total to counters itself."""
        return self.name.removesuffix("_total")


class MetricSet(Collector):
    """Makes metrics and renders them. Labels come from fixed sets: nothing that a client or a peer
    makes up becomes one."""

    def __init__(self, component: str) -> None:
        self.families: list[Family] = []
        self._registry = CollectorRegistry()
        # For fleets with two versions, during an upgrade.
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
        """A metric that is read off something else at each scrape."""
        family = Family(name, kind, text, labels)

        def collect() -> Metric:
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            metric = make(family.base, text, labels=labels)
            for values, value in sorted(samples().items()):
                metric.add_metric(values, value)
            return metric

        self.add(family, collect)

    def add(self, family: Family, collect: Callable[[], Metric]) -> None:
        """A metric whose samples `collect` makes at each scrape."""
        self._note(family)
        self._registry.register(_Read(collect))

    def collect(self) -> Iterator[Metric]:
        """Without the times at which counters and histograms began: a series more for each."""
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric

    def describe(self) -> list[Metric]:
        """Nothing is read before the first scrape."""
        return []

    def render(self) -> bytes:
        """The Prometheus text format."""
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
