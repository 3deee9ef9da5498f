"""A trace as a table: process, step, time, and a bar for each span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Group

    from kvxfer.traces import Trace, TraceSpan

# Up to this many siblings of one name have a line each; more share one line and one bar.
_MOST_ALIKE: Final = 6
_LEAST_BAR: Final = 20
_COLUMNS: Final = 72
"""The most characters that the other columns take."""


@dataclass(frozen=True, slots=True)
class _Row:
    depth: int
    name: str
    spans: Sequence[TraceSpan]

    @property
    def start(self) -> float:
        return min(span.start for span in self.spans)

    @property
    def end(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def error(self) -> str | None:
        return next((span.error for span in self.spans if span.error is not None), None)


def timeline(trace: Trace, *, width: int, every: bool = False) -> Group:
    """Draws each span of a trace below the one that called it, in order of start; then errors."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = list(_rows(trace.spans, every=every))
    begin = min(row.start for row in rows)
    whole = max(max(row.end for row in rows) - begin, 1e-9)
    cells = max(width - _COLUMNS, _LEAST_BAR)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("span", no_wrap=True)
    table.add_column("at", no_wrap=True)
    table.add_column("start", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column(f"0{f'{whole * 1e3:,.1f} ms':>{cells - 1}}", no_wrap=True)
    for row in rows:
        first = row.spans[0]
        style = "red" if row.error else ""
        table.add_row(
            Text("  " * row.depth + row.name, style=style),
            first.instance_id or first.service,
            f"{(row.start - begin) * 1e3:,.1f}",
            f"{(row.end - row.start) * 1e3:,.1f}",
            Text(_bar(row, begin, whole, cells), style=style or "cyan"),
        )
    errors = [Text(f"{row.name}: {row.error}", style="red") for row in rows if row.error]
    return Group(table, *errors)


def _rows(spans: Sequence[TraceSpan], *, every: bool) -> Iterator[_Row]:
    ids = {span.span_id for span in spans}
    below: dict[str | None, list[TraceSpan]] = {}
    for span in sorted(spans, key=lambda each: (each.start, each.end)):
        below.setdefault(span.parent_id if span.parent_id in ids else None, []).append(span)

    def walk(parent: str | None, depth: int) -> Iterator[_Row]:
        siblings = below.get(parent, [])
        told: set[str] = set()
        for span in siblings:
            alike = [other for other in siblings if other.name == span.name]
            if every or len(alike) <= _MOST_ALIKE:
                yield _Row(depth, _label(span), (span,))
                yield from walk(span.span_id, depth + 1)
            elif span.name not in told:
                told.add(span.name)
                yield _Row(depth, f"{span.name} x {len(alike)}", alike)

    return walk(None, 0)


def _label(span: TraceSpan) -> str:
    layer = span.attributes.get("kvxfer.layer")
    return span.name if layer is None else f"{span.name} {layer}"


def _bar(row: _Row, begin: float, whole: float, cells: int) -> str:
    bar = [" "] * cells

    def cell(at: float) -> int:
        return min(max(int((at - begin) / whole * cells), 0), cells - 1)

    for span in row.spans:
        for each in range(cell(span.start), cell(span.end) + 1):
            bar[each] = "━"
    for span in row.spans:
        for event in span.events:
            bar[cell(event.at)] = "◆"
    return "".join(bar)
