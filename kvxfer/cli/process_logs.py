"""The options of commands that keep running: what they log, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Logs:
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """What to log to stderr; info has a line for each request."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object each."""

    def configure(self) -> None:
        from kvxfer.logs import configure_logging

        configure_logging(self.log_level, self.log_format)
