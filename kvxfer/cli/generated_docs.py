"""The docs that are made from the code: `python -m kvxfer.cli.generated_docs docs` writes them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from kvxfer.api.app import create_app
from kvxfer.api.metrics import Metrics
from kvxfer.api.settings import Settings
from kvxfer.connectors.vllm.metrics import FAMILIES as VLLM_FAMILIES
from kvxfer.docstrings import docstrings
from kvxfer.engine.options import EngineOptions, EngineTuning, bounds_of, default_of
from kvxfer.metric_set import Family
from kvxfer.router.metrics import Metrics as RouterMetrics
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from kvxfer.engine import Engine
    from kvxfer.kv.endpoint import KvEndpoint

_HEAD: Final = """\
# Metrics

This page lists every metric. `python -m kvxfer.cli.generated_docs docs` generates it from the code.
Names follow Prometheus' conventions: base units, `_total` for counters. Labels have fixed sets of
values; `code` is an error code ([errors.md](errors.md)). A histogram has `_bucket`,
`_sum` and `_count`.

`deploy/helm/kvxfer` has a dashboard and alerts
([observe.md](observe.md#dashboard-and-alerts)).
"""
_SECTIONS: Final[Mapping[str, str]] = {
    "Control plane": """\
`GET /metrics` of `kvxfer serve`, with a token of scope `monitor` or `admin`. `kvxfer_instances`,
`kvxfer_transfers_*`, `kvxfer_registrations_total`, `kvxfer_leases_expired_total`,
`kvxfer_weight_updates_total` and `kvxfer_fleet_*` describe the whole registry and are the same on
every replica that shares it: take the maximum over replicas, never the sum. The other metrics
describe one process.""",
    "Router": "`GET /metrics` of `kvxfer router`, without a key.",
    "Worker": """\
`GET /metrics` of `kvxfer worker`. Other programs register
`kvxfer.worker_metrics.WorkerMetrics(engine, endpoint)` with their Prometheus registry.""",
    "vLLM": "In vLLM's own `/metrics`, with vLLM's usual labels.",
}


def families() -> dict[str, tuple[Family, ...]]:
    """Returns every metric, by the part of kvxfer that has it."""
    # Nothing is read from the engine before the first scrape.
    worker = WorkerMetrics(cast("Engine", None), cast("KvEndpoint", None))
    return {
        "Control plane": tuple(Metrics().set.families),
        "Router": tuple(RouterMetrics().set.families),
        "Worker": tuple(worker.set.families),
        "vLLM": VLLM_FAMILIES,
    }


def metrics() -> str:
    """Returns the text of docs/metrics.md."""
    parts = [_HEAD]
    for title, of_it in families().items():
        parts.append(f"## {title}\n\n{_SECTIONS[title]}\n\n{_table(of_it)}")
    return "\n".join(parts)


def _table(of_it: Iterable[Family]) -> str:
    lines = ["| metric | type | unit | labels | |", "|---|---|---|---|---|"]
    lines += [
        f"| `{f.name}` | {f.kind} | {f.unit} | {', '.join(f.labels)} | {f.text} |"
        for f in sorted(of_it, key=lambda family: family.name)
    ]
    return "\n".join(lines) + "\n"


_OPTIONS_HEAD: Final = """\
# Engine options

The arguments of `kvxfer.Engine`. `python -m kvxfer.cli.generated_docs docs` makes the tables from
the code.
"""
_TUNING_HEAD: Final = """\
## Tuning

Options that few engines need: `Engine(tuning={"lanes": 4})`.
"""
_OPTIONS_REST: Final = "## In a server\n"


def engine_options(page: str) -> str:
    """Returns the text of docs/engine-options.md: the tables, and the rest of the page as it is."""
    _, begins, rest = page.partition(_OPTIONS_REST)
    parts = [
        _OPTIONS_HEAD,
        _options_table(EngineOptions, ""),
        _TUNING_HEAD,
        _options_table(EngineTuning, "tuning."),
        begins + rest,
    ]
    return "\n".join(parts)


def _options_table(cls: type, prefix: str) -> str:
    lines = ["| option | default | bounds | |", "|---|---|---|---|"]
    for name, text in docstrings(cls).items():
        if name == "tuning":
            continue
        told = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text).replace("|", r"\|")
        default = default_of(prefix + name)
        lines.append(f"| `{name}` | {default} | {bounds_of(prefix + name)} | {told} |")
    return "\n".join(lines) + "\n"


def openapi() -> str:
    """Returns the text of docs/openapi.json."""
    # The key signs nothing here: only the routes are read.
    app = create_app(Settings(cluster_key=bytes(16)), EmbeddedRegistry())
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m kvxfer.cli.generated_docs FOLDER")
    folder = Path(sys.argv[1])
    options = (folder / "engine-options.md").read_text(encoding="utf-8")
    for name, text in (
        ("metrics.md", metrics()),
        ("openapi.json", openapi()),
        ("engine-options.md", engine_options(options)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
