"""The output of every subcommand: the console, one-line errors, JSON, logs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.text import Text

from kvxfer.errors import KvxferError

_WIDE: Final = 160
# Results go to stdout, progress and errors to stderr, so that `--json` can be piped. Lines for a
# program are not wrapped at the usual width of a terminal.
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDE)
err = Console(stderr=True)


def show_error(error: KvxferError, *, as_json: bool) -> None:
    if as_json:
        told = {"code": error.code, "message": str(error)}
        if request_id := getattr(error, "request_id", None):
            told["request_id"] = request_id
        show_json({"error": told})
    else:
        line = Text.assemble(("error ", "bold red"), (f"[{error.code}] ", "red"), str(error))
        err.print(line, soft_wrap=True)  # one line, however long


def show_staleness(stale_seconds: float | None) -> None:
    """Prints a line below a table whose content may be out of date."""
    if stale_seconds is not None:
        line = (
            f"stale: this was known {stale_seconds:.1f} s ago; the control plane cannot reach its "
            "registry"
        )
        out.print(Text(line, style="yellow"), soft_wrap=True)


def show_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


@dataclass(frozen=True, slots=True)
class Logs:
    """The options of commands that keep running."""

    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """The least severe level to log to stderr; info has a line for each request."""
    log_format: Literal["text", "json"] = "text"
    """Log lines of text for people, or of one JSON object each."""

    def configure(self) -> None:
        from kvxfer.logs import configure_logging

        configure_logging(self.log_level, self.log_format)
