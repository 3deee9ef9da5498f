"""Defects to plant in the code of MoE groups. The rounds must find each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kvxfer.moe.agreement import Agreement
from kvxfer.moe.all_to_all import AllToAll
from kvxfer.moe.results import Combined


def _missing_ranks_are_not_named() -> None:
    combine_recv = AllToAll.combine_recv

    def silent(self: AllToAll, **named: Any) -> Combined:
        return replace(combine_recv(self, **named), missing=())

    AllToAll.combine_recv = silent  # type: ignore[assignment, method-assign]


def _the_view_never_changes() -> None:
    def boundary(self: Agreement, deadline: float) -> None:
        self._engine.take()

    Agreement.boundary = boundary  # type: ignore[method-assign]


DEFECTS: Final[dict[str, Callable[[], None]]] = {
    "missing ranks are not named": _missing_ranks_are_not_named,
    "the view never changes": _the_view_never_changes,
}
"""Functions that break the code, by name."""
