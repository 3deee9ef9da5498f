"""What the chart's dashboard and alerts ask Prometheus for, and the metrics that the code has."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.deploy.chart import Rendered
from tests.deploy.programs import sources


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
    """As the code names them; one that ends with _ begins several."""
    return frozenset(re.findall(r'"((?:vllm:)?kvxfer_[a-z_]*)', sources()))


def counted(name: str, known: frozenset[str]) -> bool:
    base = re.sub(r"_(bucket|count|sum|total|created|info)$", "", name)
    return base in known or any(base.startswith(one) for one in known if one.endswith("_"))
