"""The Helm chart: what each value set renders fits Kubernetes, the programs and itself."""

from __future__ import annotations

import functools
from pathlib import Path

import helm_python
import pytest

from tests.deploy.chart import CHART, VALUE_SETS, Rendered, render, value_set
from tests.deploy.checks import CHECKS
from tests.deploy.programs import vllm_transfer

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


OPTIONS = {
    "exclude_nics": ["mlx5_8", "mlx5_bond*"],
    "ofi_strict": False,
    "peer_timeout": 2.5,
    "traffic_class": 106,
    "window_bytes": 1 << 30,
}


def test_options_of_the_transfer_engine_reach_the_workers() -> None:
    reference = render({"workers": {"transferEngine": OPTIONS}})
    vllm = {"engine": "vllm", "model": "m", "connector": {"lease_seconds": 60}}
    of_vllm = render({"workers": {**vllm, "transferEngine": OPTIONS}})
    workers = [each for each in reference.containers() if each.component == "prefill"]
    assert [
        argument
        for argument in workers[0].arguments
        if argument.startswith(("--engine-option", "--peer-timeout"))
    ] == [
        "--engine-option=exclude_nics=mlx5_8,mlx5_bond*",
        "--engine-option=ofi_strict=false",
        "--peer-timeout=2.5",
        "--engine-option=traffic_class=106",
        "--engine-option=window_bytes=1073741824",
    ]
    for container in of_vllm.containers():
        if container.component in ("prefill", "decode"):
            extra = vllm_transfer(container)["kv_connector_extra_config"]
            assert OPTIONS.items() <= extra.items()
            assert extra["lease_seconds"] == 60
    for release in (reference, of_vllm):
        for check in CHECKS.values():
            assert list(check(release)) == []
