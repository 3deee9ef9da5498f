"""Options follow from settings, and settings are made of options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from kvxfer.cli.options import OptionsOf, with_options
from kvxfer.errors import InvalidArgument
from kvxfer.settings import Seconds, check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    key: bytes
    max_pots: Annotated[int, Meta(ge=1, le=8)] = 4
    """Pots at once."""
    wait_seconds: Seconds = 2.0
    """Seconds that a guest waits."""
    recipe: Path | None = None
    """The dish to cook."""
    salt: bool = False
    """Whether it is salted."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True)
class Table:
    seat: Annotated[str, typer.Option("--chair", envvar="TEST_CHAIR")]
    """The seat at the table."""


@pytest.fixture
def made() -> list[object]:
    return []


@pytest.fixture
def app(made: list[object]) -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_options
    def cook(
        guest: str,
        table: Table,
        given: Annotated[
            dict[str, Any],
            OptionsOf(Kitchen, without=("key",), recipe=typer.Option(show_default="soup")),
        ],
        loud: Annotated[bool, typer.Option("--loud")] = False,
    ) -> None:
        """Cook."""
        made.extend((guest, table, Kitchen(key=b"k", **given), loud))

    return app


def test_a_command_gets_what_its_options_make(app: typer.Typer, made: list[object]) -> None:
    words = ["ann", "--chair", "1", "--max-pots", "8", "--recipe", "r.txt", "--salt", "--loud"]
    assert CliRunner().invoke(app, words).exit_code == 0
    kitchen = Kitchen(key=b"k", max_pots=8, recipe=Path("r.txt"), salt=True)
    assert made == ["ann", Table("1"), kitchen, True]


def test_defaults_are_those_of_the_settings(app: typer.Typer, made: list[object]) -> None:
    assert CliRunner().invoke(app, ["ann"], env={"TEST_CHAIR": "2"}).exit_code == 0
    assert made == ["ann", Table("2"), Kitchen(key=b"k"), False]


def test_help_says_what_the_settings_say(app: typer.Typer) -> None:
    told = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    lines = {
        words[1]: " ".join(words[2:-1]) for line in told.splitlines() if (words := line.split())[2:]
    }
    assert lines["--max-pots"] == "<int range> [1<=x<=8] Pots at once. [default: 4]"
    assert lines["--wait-seconds"] == "<float> Seconds that a guest waits. [default: 2.0]"
    assert lines["--recipe"] == "<path> The dish to cook. [default: (soup)]"
    assert lines["--salt"] == "<bool> Whether it is salted."
    assert lines["*"].startswith("--chair <str> The seat at the table.")
    assert "--key" not in told
    assert "--no-salt" not in told


@pytest.mark.parametrize(
    ("words", "exit_code", "error"),
    [
        (["ann"], 2, SystemExit),
        (["ann", "--chair", "1", "--max-pots", "9"], 2, SystemExit),
        (["ann", "--chair", "1", "--wait-seconds", "0"], 1, InvalidArgument),
    ],
)
def test_missing_options_and_values_out_of_bounds_are_refused(
    app: typer.Typer, made: list[object], words: list[str], exit_code: int, error: type
) -> None:
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == exit_code
    assert isinstance(refused.exception, error)
    assert made == []
