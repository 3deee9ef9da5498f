"""What every benchmark prints."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from rich.console import RenderableType

from kvxfer.cli.output import out, show_json


def show(report: object, tables: Iterable[RenderableType], *, as_json: bool) -> None:
    """The report as tables, or every figure of it as JSON."""
    if as_json:
        show_json(msgspec.to_builtins(report))
    else:
        for table in tables:
            out.print(table)
