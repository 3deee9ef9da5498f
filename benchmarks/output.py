"""The output of all benchmarks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from rich.console import RenderableType

from kvxfer.cli.output import out, show_json


def show(report: object, tables: Iterable[RenderableType], *, as_json: bool) -> None:
    """Prints the report as tables, or all its figures as JSON."""
    if as_json:
        show_json(msgspec.to_builtins(report))
    else:
        for table in tables:
            out.print(table)
