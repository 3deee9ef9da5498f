"""The output of `kvxfer simulate`: a table of the policies, the course of the day, the actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvxfer.scheduler.simulator.run import Simulation
    from kvxfer.scheduler.simulator.tally import Point, Results

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 40
_COLOURS: Final = {True: "green", False: "yellow"}


def report(
    simulation: Simulation, results: Sequence[Results], *, show_actions: bool
) -> Iterator[RenderableType]:
    yield from _header(results[0], simulation)
    yield _figures(simulation, results)
    for result in results:
        yield _course(result)
    for result in results:
        if result.actions and show_actions:
            yield _actions(result)


def _header(result: Results, simulation: Simulation) -> Iterator[str]:
    yield (
        f"workload {simulation.workload.name}: {result.requests:,.0f} requests in "
        f"{result.seconds / 3600:.3g} h, {result.requests / result.seconds:,.1f}/s"
    )
    if result.sampled:
        width = simulation.windows()[0]
        yield (
            f"simulated one by one: {result.simulated:,} of them, all in {result.windows} windows "
            f"of {width.end - width.start:.3g} s, one in each "
            f"{(width.ends - width.begins) / 60:.3g} min; a fluid model in between"
        )
    else:
        yield f"simulated one by one: all {result.simulated:,}"


def _figures(simulation: Simulation, results: Sequence[Results]) -> Table:
    table = Table(box=None, title_justify="left")
    table.add_column("policy")
    for result in results:
        table.add_column(result.policy, justify="right")
    targets = f"TTFT {simulation.ttft_target:g} s, ITL {simulation.itl_target * 1000:g} ms"
    rows: list[tuple[str, Callable[[Results], str]]] = [
        ("TTFT p50, s", lambda r: _number(r.ttft[50])),
        ("TTFT p90", lambda r: _number(r.ttft[90])),
        ("TTFT p95", lambda r: _number(r.ttft[95])),
        ("TTFT p99", lambda r: _number(r.ttft[99])),
        ("ITL p50, ms", lambda r: _number(r.itl[50], 1000)),
        ("ITL p90", lambda r: _number(r.itl[90], 1000)),
        ("ITL p95", lambda r: _number(r.itl[95], 1000)),
        ("ITL p99", lambda r: _number(r.itl[99], 1000)),
        (f"within {targets}", _good),
        ("goodput, requests/s", lambda r: f"{r.goodput:,.1f}"),
        ("output, tokens/s", lambda r: f"{r.output_tokens_per_second:,.0f}"),
        ("refused, no pair in time", lambda r: f"{r.refused:.2%}"),
        ("given up, no token in time", lambda r: f"{r.late:.2%}"),
        ("prompt tokens from a cache", lambda r: f"{r.cached:.1%}"),
        ("prefill computes", lambda r: f"{r.prefill_busy:.1%} of its time"),
        ("mean batch of decode", lambda r: f"{r.decode_batch:.1f} of {simulation.model.batch}"),
        ("prefill workers", lambda r: _range(r, lambda p: p.prefill_workers)),
        ("decode workers", lambda r: _range(r, lambda p: p.decode_workers)),
        ("scaling actions", lambda r: f"{len(r.actions)}"),
        ("GPU hours", lambda r: f"{r.gpu_hours:,.1f}"),
    ]
    if simulation.cost_per_hour:
        rows.append(("cost", lambda r: f"{r.cost:,.2f}"))
        rows.append(("per million good requests", _cost_per_million))
    for title, figure in rows:
        table.add_row(title, *(figure(result) for result in results))
    return table


def _good(result: Results) -> str:
    error = "" if result.good_error is None else f" ± {result.good_error * 100:.2f}"
    return f"{result.good * 100:.2f}{error} %"


def _cost_per_million(result: Results) -> str:
    good = result.good * result.requests
    return f"{result.cost / good * 1e6:,.2f}" if good else "-"


def _number(value: float | None, times: float = 1.0) -> str:
    return "-" if value is None else f"{value * times:.3g}"


def _range(result: Results, of: Callable[[Point], int]) -> str:
    counts = [of(point) for point in result.course]
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _course(result: Results) -> Table:
    """Makes a table with a line of bars over time for each figure."""
    table = Table(box=None, title=f"course of {result.policy}", title_justify="left")
    for header in ("", "least"):
        table.add_column(header, no_wrap=True, justify="right" if header else "left")
    table.add_column(f"0 to {result.seconds / 3600:.3g} h", no_wrap=True)
    table.add_column("most", no_wrap=True, justify="right")
    lines: list[tuple[str, Callable[[Point], float | None], str]] = [
        ("requests/s", lambda p: p.requests_per_second, ",.1f"),
        ("prefill workers", lambda p: float(p.prefill_workers), ".0f"),
        ("decode workers", lambda p: float(p.decode_workers), ".0f"),
        ("TTFT p90, s", lambda p: p.ttft_p90, ".3g"),
        ("ITL p90, ms", lambda p: None if p.itl_p90 is None else p.itl_p90 * 1000, ".3g"),
        ("within targets, %", lambda p: None if p.goodput is None else p.goodput * 100, ".1f"),
    ]
    for title, of, form in lines:
        values = _columns([of(point) for point in result.course])
        known = [value for value in values if value is not None]
        if known:
            least, most = min(known), max(known)
            table.add_row(title, f"{least:{form}}", _bars(values, least, most), f"{most:{form}}")
    return table


def _columns(values: Sequence[float | None]) -> list[float | None]:
    """Returns as many values as fit, each the mean of those that fall into it."""
    columns: list[float | None] = []
    count = min(len(values), _WIDTH)
    for column in range(count):
        part = values[column * len(values) // count : (column + 1) * len(values) // count]
        known = [value for value in part if value is not None]
        columns.append(sum(known) / len(known) if known else None)
    return columns


def _bars(values: Sequence[float | None], least: float, most: float) -> str:
    span = most - least
    return "".join(
        " "
        if value is None
        else _BARS[round((value - least) / span * (len(_BARS) - 1)) if span else 0]
        for value in values
    )


def _actions(result: Results) -> Table:
    table = Table(box=None, title=f"scaling actions of {result.policy}", title_justify="left")
    table.add_column("at", justify="right", no_wrap=True)
    for header in ("role", "workers"):
        table.add_column(header, no_wrap=True)
    table.add_column("because", overflow="fold")
    for action in result.actions:
        minutes, seconds = divmod(round(action.at), 60)
        counts = Text(
            f"{action.before} → {action.after}", style=_COLOURS[action.after > action.before]
        )
        when = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        table.add_row(when, action.role, counts, Text(action.because))
    return table
