"""The queries of the chart's dashboard and alerts, and the metrics that the code has."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from kvxfer.cli.generated_docs import families
from tests.deploy.chart import Rendered


def expressions(release: Rendered) -> Iterator[tuple[str, str]]:
    for one in release.of("PrometheusRule"):
        for group in one["spec"]["groups"]:
            for rule in group["rules"]:
                yield f"{rule.get('alert', rule.get('record'))}", str(rule["expr"])
    for one in release.of("ConfigMap"):
        for file, text in one["data"].items():
            if file.endswith(".json"):
                for expression in _queries(json.loads(text)):
                    yield file, expression


def _queries(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for name, value in part.items():
            if name in ("expr", "query", "definition") and isinstance(value, str):
                yield value
            else:
                yield from _queries(value)
    elif isinstance(part, list):
        for value in part:
            yield from _queries(value)


@functools.cache
def metric_names() -> frozenset[str]:
    """Returns the names of all series that the processes expose."""
    return frozenset(
        name
        for part in families().values()
        for family in part
        for name in (
            [f"{family.name}_{suffix}" for suffix in ("bucket", "sum", "count")]
            if family.kind == "histogram"
            else [family.name]
        )
    )
