"""The docs that are made from the code: `python -m kvxfer.cli.generated_docs docs` writes them."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from kvxfer.api.app import create_app
from kvxfer.api.metrics import Metrics
from kvxfer.api.settings import Settings
from kvxfer.connectors.vllm.metrics import FAMILIES as VLLM_FAMILIES
from kvxfer.docstrings import docstrings
from kvxfer.engine.options import EngineOptions, EngineTuning, bounds_of, default_of
from kvxfer.errors import (
    BenchError,
    ControlPlaneError,
    EngineError,
    InvalidApiKey,
    InvalidArgument,
    KvxferError,
    MoeGroupLost,
    NotBuilt,
    NotLeader,
    Overloaded,
    ProcessFailed,
    RankExcluded,
    RankLost,
    ScalingFailed,
    ScorerFailed,
    StepRefused,
    TooManyWrongKeys,
    TransferError,
    UnknownModel,
    WeightUpdateError,
    WorkerError,
    WorkerKeyRefused,
    every,
)
from kvxfer.metric_set import Family
from kvxfer.router.metrics import Metrics as RouterMetrics
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from kvxfer.engine import Engine
    from kvxfer.kv.endpoint import KvEndpoint

_METRICS_HEAD: Final = """\
# Metrics

This page lists every metric. `python -m kvxfer.cli.generated_docs docs` generates it from the code.
Names follow Prometheus' conventions: base units, `_total` for counters. Labels have fixed sets of
values; `code` is an error code ([errors.md](errors.md)). A histogram has `_bucket`,
`_sum` and `_count`.

`deploy/helm/kvxfer` has a dashboard and alerts
([observe.md](observe.md#dashboard-and-alerts)).
"""
_METRICS_SECTIONS: Final[Mapping[str, str]] = {
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
_ERRORS_HEAD: Final = """\
# Errors

This page lists every error. `python -m kvxfer.cli.generated_docs docs` generates it from
`kvxfer.errors`, which has a class for each code and draws their tree.

A code is the same in Python (`error.code`), REST problem details, metrics and logs. The message
names what failed, with whom, and the remedy. A code without a remedy here stands for several.

`status` is that of the REST APIs, 500 where it is empty; `router` is that of the router, 502 where
it is empty. The names in parentheses are members of the problem document and of `error.details`.
"""
_ERRORS_SECTIONS: Final[Mapping[str, tuple[str, Sequence[type[KvxferError]]]]] = {
    "General": ("", (InvalidArgument, NotBuilt, ProcessFailed)),
    "Engine": ("", (EngineError,)),
    "KV transfers": ("", (TransferError,)),
    "Weights, groups of ranks": (
        "",
        (WeightUpdateError, RankLost, RankExcluded, StepRefused, MoeGroupLost),
    ),
    "Control plane": (
        """\
Three codes have no class: 404 `not-found` and 405 `method-not-allowed`, if there is no such route,
and 500 `internal-error`, a defect, which the log has. A worker that the control plane refuses
answers with 502, or with 503 if it is unavailable.

""",
        (ControlPlaneError, ScorerFailed, ScalingFailed, NotLeader),
    ),
    "Router": (
        "The router's answers have OpenAI's format, and [some of its codes](router.md#errors).\n\n",
        (
            UnknownModel,
            InvalidApiKey,
            TooManyWrongKeys,
            Overloaded,
            WorkerError,
            WorkerKeyRefused,
        ),
    ),
    "Benchmarks": ("", (BenchError,)),
}
_PAGE: Final = re.compile(r"docs/([a-z-]+\.md)(#[a-z-]+)?")


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
    parts = [_METRICS_HEAD]
    for title, of_it in families().items():
        parts.append(f"## {title}\n\n{_METRICS_SECTIONS[title]}\n\n{_metrics_table(of_it)}")
    return "\n".join(parts)


def _metrics_table(of_it: Iterable[Family]) -> str:
    rows = (
        (f"`{f.name}`", f.kind, f.unit, ", ".join(f.labels), f.text)
        for f in sorted(of_it, key=lambda family: family.name)
    )
    return _table(("metric", "type", "unit", "labels", "meaning"), rows)


def errors() -> str:
    """Returns the text of docs/errors.md."""
    parts = [_ERRORS_HEAD]
    for title, (said, roots) in _ERRORS_SECTIONS.items():
        of_it = [kind for root in roots for kind in every(root)]
        parts.append(f"## {title}\n\n{said}{_errors_table(of_it)}")
    return "\n".join(parts)


def _errors_table(of_it: Sequence[type[KvxferError]]) -> str:
    rows = [
        (_code(kind), _status(kind, "status"), _status(kind, "router_status"), *_words(kind))
        for kind in of_it
    ]
    names = ("code", "status", "router", "meaning", "remedy")
    # A column without an entry is left out.
    shown = [column for column in range(len(names)) if any(row[column] for row in rows)]
    return _table(
        [names[column] for column in shown], ([row[column] for column in shown] for row in rows)
    )


def _code(kind: type[KvxferError]) -> str:
    members = ", ".join(f"`{name}`" for name in kind.members)
    return f"`{kind.code}`" + (f" ({members})" if members else "")


def _status(kind: type[KvxferError], name: str) -> str:
    """Returns the status, or nothing if it is the one of all errors that state none."""
    stated = any(name in vars(each) for each in kind.__mro__ if each is not KvxferError)
    return str(getattr(kind, name)) if stated else ""


def _words(kind: type[KvxferError]) -> tuple[str, str]:
    """Returns meaning and remedy."""
    meaning, _, _ = (inspect.getdoc(kind) or "").partition("\n\n")
    return meaning.replace("\n", " "), _PAGE.sub(r"[\1](\1\2)", kind.remedy)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(cells)} |\n" for cells in (names, *rows))
    return f"{head}|{'---|' * len(names)}\n{''.join(body)}"


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
    rows = (
        (
            f"`{name}`",
            default_of(prefix + name),
            bounds_of(prefix + name),
            re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text).replace("|", r"\|"),
        )
        for name, text in docstrings(cls).items()
        if name != "tuning"
    )
    return _table(("option", "default", "bounds", "meaning"), rows)


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
        ("errors.md", errors()),
        ("metrics.md", metrics()),
        ("openapi.json", openapi()),
        ("engine-options.md", engine_options(options)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
