import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvxfer.bench.figures import overhead_figure, scatter_figure
from kvxfer.bench.null import (
    CASES,
    PAGE_BYTES,
    NullCase,
    measure_null,
    measure_scatter,
    null_writer,
)
from kvxfer.bench.pages import PageLists
from kvxfer.bench.table import overhead_table, scatter_table
from kvxfer.bench.targets import OVERHEAD, SCATTER
from kvxfer.cli import app
from kvxfer.errors import OutOfBounds

pytestmark = pytest.mark.native

PAGES = 4096
RUNS_TARGETS = OVERHEAD["runs of 16"]


def breaks(pages: PageLists) -> list[int]:
    """Returns the positions of pages that do not follow the one before on both sides."""
    follows = (np.diff(pages.src) == 1) & (np.diff(pages.dst) == 1)
    return [int(i) + 1 for i in np.flatnonzero(~follows)]


@pytest.mark.parametrize(
    ("case", "run"), [(CASES[0], 1), (CASES[1], 16), (CASES[2], PAGES)], ids=lambda each: str(each)
)
def test_pages_come_in_runs_of_just_that_length(case: NullCase, run: int) -> None:
    pages = case.draw(3, PAGES)
    assert len(pages.src) == len(pages.dst) == PAGES
    assert breaks(pages) == list(range(run, PAGES, run))
    for side in (pages.src, pages.dst):
        assert len(np.unique(side)) == PAGES
        assert 0 <= side.min() <= side.max() < 2 * PAGES


def test_figures_are_per_page_and_the_median_until_completion_is_judged() -> None:
    targets = (replace(RUNS_TARGETS[0], bound=50.0), replace(RUNS_TARGETS[1], bound=3.0))
    figure = overhead_figure("each", 10, 5, [100, 300, 200], [400, 900, 500], [30], targets)
    assert (figure.call_p50, figure.call_min) == (20.0, 10.0)
    assert (figure.completed_p50, figure.completed_min) == (50.0, 40.0)
    assert figure.received_p50 == 3.0
    assert figure.met
    assert not overhead_figure("each", 10, 5, [100], [501], [30], targets).met
    assert not overhead_figure("each", 10, 5, [100], [500], [31], targets).met


def test_a_run_of_pages_is_one_write_of_at_most_1_mib() -> None:
    rounds: list[None] = []
    figures = measure_null(1, 2, lambda: rounds.append(None), pages=PAGES)
    assert len(rounds) == 2
    assert [each.writes for each in figures] == [PAGES, PAGES // 16, PAGES * PAGE_BYTES >> 20]
    for each in figures:
        assert len(each.call_ns) == len(each.completed_ns) == len(each.received_ns) == 2
        assert min(each.call_ns + each.completed_ns + each.received_ns) > 0


def test_a_scatter_is_timed_once_a_round() -> None:
    rounds: list[None] = []
    figure = measure_scatter(3, lambda: rounds.append(None), peers=4)
    assert len(rounds) == len(figure.posted_ns) == 3
    assert figure.peers == 4
    assert min(figure.posted_ns) > 0


def test_the_median_scatter_is_judged() -> None:
    target = replace(SCATTER, bound=5.0)
    figure = scatter_figure(64, [4000, 9000, 5000], target)
    assert (figure.posted_p50, figure.posted_min, figure.met) == (5.0, 4.0, True)
    assert not scatter_figure(64, [5001], target).met
    console = Console(width=120)
    with console.capture() as capture:
        console.print(scatter_table(figure))
    for text in ("64", "5.00", "≤ 5", "4.00"):
        assert text in capture.get()


def test_a_page_outside_is_the_engines_error() -> None:
    pages = np.array([0, 8])
    with null_writer(8 * PAGE_BYTES) as writer, pytest.raises(OutOfBounds, match="position 1"):
        writer.write(PageLists(PAGE_BYTES, pages, pages))


def test_the_table_shows_each_case_beside_its_target() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(
            overhead_table(
                [overhead_figure("runs", 1000, 63, [2500], [3500], [1250], RUNS_TARGETS)]
            )
        )
    for text in ("runs", "1,000", "63", "2.50", "3.50", "≤ 25", "1.25", "≤ 10"):
        assert text in capture.get()


def test_the_command_prints_every_sample_as_json() -> None:
    result = CliRunner().invoke(app, ["bench", "--null", "--quick", "--seed", "9", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["seed"] == 9
    assert [each["name"] for each in report["overhead"]] == [case.name for case in CASES]
    assert all(len(each["completed_ns"]) == 20 for each in report["overhead"])
    assert len(report["scatter"]["posted_ns"]) == 20


def test_the_command_prints_a_table() -> None:
    result = CliRunner().invoke(app, ["bench", "--null", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    assert "scattered" in result.output
