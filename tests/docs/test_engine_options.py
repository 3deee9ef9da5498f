"""docs/engine-options.md has the options that the code has."""

from __future__ import annotations

from pathlib import Path

from kvxfer.cli.generated_docs import engine_options

PAGE = Path(__file__).parents[2] / "docs/engine-options.md"


def test_the_tables_of_the_page_are_fresh() -> None:
    remedy = "run `python -m kvxfer.cli.generated_docs docs`"
    assert PAGE.read_text() == engine_options(PAGE.read_text()), remedy
