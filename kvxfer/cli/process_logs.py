"""The options of commands that keep running: what they log, and how."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(help="What to log to stderr; info has a line for each request."),
]
LogFormatOption = Annotated[
    Literal["text", "json"], typer.Option(help="Lines for people, or one JSON object each.")
]
