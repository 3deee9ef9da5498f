"""docs/performance.md: its targets are those of the code, its commands those that measure them."""

from __future__ import annotations

import re
from pathlib import Path

from kvxfer.bench.targets import TARGETS

DOCUMENT = (Path(__file__).parents[2] / "docs/performance.md").read_text()


def rows(first_heading: str) -> list[list[str]]:
    """The cells of the table that begins with this heading."""
    found = re.search(rf"^\| {first_heading} \|.*\n\|[-|]+\n((\|.*\n)+)", DOCUMENT, re.MULTILINE)
    assert found is not None
    return [line.strip("| ").split("|") for line in found[1].splitlines()]


def test_the_table_has_every_target_as_it_is_defined() -> None:
    described = [" | ".join(cell.strip() for cell in row[:6]) for row in rows("target")]
    assert described == [
        f"{each.name} | {each.measured} | {each.against} | {each} | "
        f"{'exit 1' if each.required else 'red'} | `{each.command}`"
        for each in TARGETS
    ]


def test_every_command_with_a_target_is_described() -> None:
    commands = {command for row in rows("command") for command in re.findall(r"`(.+?)`", row[0])}
    assert {target.command for target in TARGETS} <= commands
