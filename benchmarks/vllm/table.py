"""A report as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.vllm.figures import (
    QUIET,
    TARGET_IDLE,
    TARGET_LAYER_US,
    TARGET_RATIO,
    TARGET_TOKENS,
    TARGET_TTFT,
    TARGET_WAITING,
    Mode,
    Spread,
    VllmReport,
)


def report_tables(report: VllmReport) -> Iterator[RenderableType]:
    machine = report.machine
    yield Text(
        f"{report.started_at}  {machine.cores} cores, {machine.cpu}, Linux {machine.kernel}; "
        f"load average before the run {report.load_average:.1f}\n"
        f"Milliseconds, medians of {report.rounds} rounds; one request at a time; ratio to "
        "aggregated in the round of the same number"
    )
    yield _times(report)
    yield _verdicts(report)


def _times(report: VllmReport) -> Table:
    table = Table(title="Time to first token", title_justify="left", padding=(0, 0))
    table.add_column("tokens", justify="right")
    table.add_column("mode", no_wrap=True)
    columns = ("TTFT", "p90", "ratio", "before", "prefill", "visible", "p90", "after")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for figure in report.figures:
        first = figure.mode is Mode.AGGREGATED
        table.add_row(
            f"{figure.prompt_tokens:,}" if first else None,
            figure.mode,
            *_spread(figure.ttft),
            None if first else f"{figure.ttft_ratio:.2f}",
            _spread(figure.until_prefill)[0],
            _spread(figure.prefill)[0],
            *_spread(figure.visible_transfer),
            _spread(figure.first_decode_step)[0],
            end_section=figure.mode is Mode.NIXL,
        )
    table.caption = (
        "before: until prefill's first step; visible: transfer, from prefill's last layer to "
        "decode's first step; after: until the token is at the client"
    )
    return table


def _verdicts(report: VllmReport) -> Table:
    table = Table(title_justify="left", padding=(0, 0))
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("target", justify="right")
    tokens, forward = f"{TARGET_TOKENS:,} tokens", report.forward_thread
    table.add_row(
        f"visible, {tokens}: push to NixlConnector",
        _judged(f"{report.visible_ratio:.2f}", met=report.visible_ratio <= TARGET_RATIO),
        f"≤ {TARGET_RATIO:.2f}",
    )
    table.add_row(
        f"TTFT, {tokens}: push to pull",
        _judged(f"{report.ttft_ratio:.2f}", met=report.ttft_ratio < TARGET_TTFT),
        f"< {TARGET_TTFT:.2f}",
    )
    table.add_row(
        f"prefill's forward, a layer with {forward.requests} requests",
        _judged(f"{forward.layer:.1f} µs", met=forward.layer <= TARGET_LAYER_US),
        f"≤ {TARGET_LAYER_US:g} µs",
    )
    table.add_row("before the forward, each request", f"{forward.before:.1f} µs")
    for name, cores in report.idle_cores.items():
        if name == Mode.AGGREGATED:
            table.add_row(f"{name}, idle, share of a core", f"{cores:.1%}")
        else:
            met = cores <= TARGET_IDLE + report.idle_cores[Mode.AGGREGATED]
            table.add_row(
                f"{name}, idle, share of a core",
                _judged(f"{cores:.1%}", met=met),
                f"≤ {TARGET_IDLE:.0%} above aggregated",
            )
    for how, cores in report.waiting_cores.items():
        what = f"both servers while a push waits, {how}"
        if how == QUIET:
            judged = _judged(f"{cores:.1%}", met=cores <= TARGET_WAITING)
            table.add_row(what, judged, f"≤ {TARGET_WAITING:.0%}")
        else:
            table.add_row(what, f"{cores:.1%}")
    return table


def _spread(spread: Spread | None) -> tuple[str, str] | tuple[None, None]:
    """Median and p90."""
    return (None, None) if spread is None else (f"{spread.p50:.1f}", f"{spread.p90:.1f}")


def _judged(text: str, *, met: bool) -> Text:
    return Text(text, style="green" if met else "bold red")
