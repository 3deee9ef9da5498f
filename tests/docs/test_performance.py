"""docs/performance.md has every target, in the section that names its command, and marks figures
that miss their target."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvxfer.bench.targets import TARGETS

DOCUMENT = (Path(__file__).parents[2] / "docs/performance.md").read_text()
CELL = re.compile(
    r"(?P<bound>[^*:]+)(?P<required>\*?): (?P<bold>\*{0,2})(?P<figure>[^*]+)(?P=bold)"
)


class Described(NamedTuple):
    bound: str
    required: bool
    commands: set[str]
    bold: bool
    figures: list[float]


def described() -> Iterator[tuple[str, Described]]:
    """Yields each target. A row of a table begins with its name; the column head completes it."""
    for section in DOCUMENT.split("\n## "):
        commands = set(re.findall(r"`(.+?)`", section.replace("\n", " ").replace("  ", " ")))
        for table in re.findall(r"^(\| target \|.*\n\|[-|]+\n(?:\|.*\n)+)", section, re.MULTILINE):
            head, _, *rows = (
                [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
            )
            for name, *cells in rows:
                for column, cell in zip(head[1:], cells, strict=True):
                    if cell:
                        found = CELL.fullmatch(cell)
                        assert found is not None, cell
                        yield (
                            name if column == "figure" else f"{name}, {column}",
                            Described(
                                found["bound"],
                                bool(found["required"]),
                                commands,
                                bool(found["bold"]),
                                [float(each) for each in re.findall(r"[\d.]+", found["figure"])],
                            ),
                        )


def test_every_target_is_documented_as_it_is_defined() -> None:
    found = list(described())
    assert sorted(name for name, _ in found) == sorted(target.name for target in TARGETS)
    by_name = dict(found)
    for target in TARGETS:
        row = by_name[target.name]
        assert (row.bound, row.required) == (str(target), target.required), target.name
        assert target.command in row.commands, target.name


def test_figures_that_miss_their_targets_are_bold() -> None:
    by_name = dict(described())
    for target in TARGETS:
        row = by_name[target.name]
        assert row.figures, target.name
        assert row.bold is not all(map(target.met, row.figures)), target.name
