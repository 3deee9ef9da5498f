"""The Helm chart: what each value set renders fits Kubernetes, the programs and itself."""

from __future__ import annotations

import functools
from pathlib import Path

import helm_python
import pytest

from tests.deploy.chart import CHART, VALUE_SETS, Rendered, render, value_set
from tests.deploy.checks import CHECKS

SETS = {path.stem: path for path in VALUE_SETS}


@functools.cache
def rendered(name: str) -> Rendered:
    return render(value_set(SETS[name]) if name in SETS else {}, name=name)


@pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)
def test_lint_has_nothing_to_say(path: Path) -> None:
    report = helm_python.lint(CHART, value_set(path), strict=True, namespace="llm")
    findings = [one for one in report["messages"] if one["severity"] > 1]
    assert (report["errors"], findings) == ([], [])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["defaults", *SETS])
def test_value_set(name: str, check: str) -> None:
    assert list(CHECKS[check](rendered(name))) == []


def test_value_sets_are_those_that_the_documentation_names() -> None:
    text = (CHART.parents[2] / "docs" / "operations.md").read_text()
    assert [name for name in SETS if f"`{name}.yaml`" not in text] == []
