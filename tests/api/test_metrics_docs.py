"""docs/metrics.md: its names are those of the code and follow Prometheus' conventions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvxfer.cli.generated_docs import families, metrics
from kvxfer.metric_set import Family

DOCS = Path(__file__).parents[2] / "docs"
FAMILIES = [pytest.param(f, id=f.name) for part in families().values() for f in part]


def test_the_document_is_up_to_date() -> None:
    remedy = "python -m kvxfer.cli.generated_docs docs"
    assert (DOCS / "metrics.md").read_text() == metrics(), remedy


@pytest.mark.parametrize("family", FAMILIES)
def test_names_follow_the_conventions(family: Family) -> None:
    assert re.fullmatch(r"(vllm:)?kvxfer_[a-z][a-z0-9_]*", family.name)
    assert family.name.endswith("_total") is (family.kind == "counter")
    # Base units only, and no suffix of another kind of metric.
    forbidden = (
        r"_(ms|milliseconds|us|minutes|hours|kb|mb|mib|gib|percent|count|sum|bucket)(_total)?$"
    )
    assert not re.search(forbidden, family.name)
    assert family.kind != "histogram" or family.unit
    assert family.text.endswith(".")
    assert "|" not in family.text


def test_a_name_means_one_thing_in_every_process() -> None:
    known: dict[str, Family] = {}
    for part in families().values():
        for family in part:
            assert known.setdefault(family.name, family) == family


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_metric_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`((?:vllm:)?kvxfer_[a-z_]+[a-z])(?:\{[^`]*)?`", page.read_text()))
    assert named <= {family.name for part in families().values() for family in part}
