"""The Grafana dashboard and the alert rules: what they name exists, and each alert fires when it
should."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from kvxfer.cli.generated_docs import families

from .alert_cases import AT, CASES, Series

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvxfer"
ALERTS = CHART / "alerts.yaml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((CHART / "dashboards" / "kvxfer.json").read_text())
TARGETS = [
    (panel["title"], target["legendFormat"], target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
]
EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=rule["alert"]) for rule in RULES),
    *(pytest.param(expr, id=f"{title}: {legend}") for title, legend, expr in TARGETS),
]


def series() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yields every series of the exposition: its name, counter or gauge, and its labels."""
    for family in (f for part in families().values() for f in part):
        labels = frozenset(family.labels)
        if family.kind == "histogram":
            yield f"{family.name}_bucket", "counter", labels | {"le"}
            yield f"{family.name}_sum", "counter", labels
            yield f"{family.name}_count", "counter", labels
        else:
            yield family.name, family.kind, labels


KINDS = {name: kind for name, kind, _ in series()}
LABELS = {name: labels | {"instance"} for name, _, labels in series()}


def without_variables(expr: str) -> str:
    return expr.replace("$__rate_interval", "5m").replace("$instance", ".*")


def nodes(expr: str) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(without_variables(expr)), pre_visit=found.append)
    return found


def named(selector: Any) -> set[str]:
    by_name = [m.value for m in selector.matchers.matchers if m.name == "__name__"]
    return {selector.name} if selector.name else set(by_name[0].split("|"))


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_metrics_and_labels_exist_and_are_used_according_to_their_type(expr: str) -> None:
    every, rated, grouped = set(), set(), set()
    for node in nodes(expr):
        match node:
            case promql_parser.VectorSelector():
                every |= named(node)
                matched = {m.name for m in node.matchers.matchers} - {"__name__"}
                for name in named(node):
                    assert matched <= LABELS[name], f"{name} has no {matched - LABELS[name]}"
            case promql_parser.Call() if node.func.name in {"rate", "increase"}:
                rated |= named(node.args[0].vector_selector)
            case promql_parser.AggregateExpr() if node.modifier:
                grouped |= set(node.modifier.labels)
    assert every
    assert {KINDS[name] for name in rated} <= {"counter"}
    assert {KINDS[name] for name in every - rated} <= {"gauge"}
    assert grouped <= frozenset().union(*(LABELS[name] for name in every))


def test_every_metric_of_kvxfer_is_on_the_dashboard() -> None:
    shown = {
        name
        for _, _, expr in TARGETS
        for node in nodes(expr)
        if isinstance(node, promql_parser.VectorSelector)
        for name in named(node)
    }
    missing = {
        family.name
        for part in families().values()
        for family in part
        if not shown & ({family.name} | {f"{family.name}_{part}" for part in ("bucket", "count")})
    }
    assert not missing


@pytest.mark.parametrize(("title", "legend", "expr"), TARGETS)
def test_legends_name_labels_that_the_result_has(title: str, legend: str, expr: str) -> None:
    outer = next(n for n in nodes(expr) if isinstance(n, promql_parser.AggregateExpr))
    kept = set(outer.modifier.labels) if outer.modifier else set()
    assert set(re.findall(r"{{(\w+)}}", legend)) == kept - {"le"}


def test_panels_do_not_overlap_and_have_different_ids() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & places
        places |= cells


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_severity_and_a_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["for"]
    assert {"summary", "description", "runbook"} == rule["annotations"].keys()
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.native
def test_promtool_can_read_every_expression(tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel_{number}", "expr": without_variables(expr)}
        for number, (_, _, expr) in enumerate(TARGETS)
    ]
    board = tmp_path / "dashboard.yaml"
    board.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    for file in (ALERTS, board):
        promtool("check", "rules", file)


@pytest.mark.native
def test_each_alert_fires_on_the_bad_series_and_not_on_the_good(tmp_path: Path) -> None:
    assert CASES.keys() == {rule["alert"] for rule in RULES}
    tests = [
        test
        for name, case in CASES.items()
        for test in (
            unit_test(f"{name} fires", name, case.bad, case.labels),
            unit_test(f"{name} does not fire", name, case.good, None),
        )
    ]
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    promtool("test", "rules", file)


def unit_test(title: str, alert: str, values: Series, labels: str | None) -> dict[str, Any]:
    """Returns a promtool test. `labels` are those of the alert that must fire; None if none may."""
    firing = [] if labels is None else [{"labels": f"{{{labels}}}", "value": 1}]
    fires = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    return {
        "name": title,
        "interval": "1m",
        "input_series": [{"series": s, "values": value} for s, value in values.items()],
        "promql_expr_test": [
            {
                "expr": f"max without (alertname, alertstate, severity) ({fires})",
                "eval_time": f"{AT}m",
                "exp_samples": firing,
            }
        ],
    }


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
