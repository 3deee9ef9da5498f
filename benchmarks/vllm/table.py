"""A report as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from benchmarks.vllm.figures import Mode, Spread, VllmReport
from kvxfer.bench.render import columns, heading, verdict_table


def report_tables(report: VllmReport) -> Iterator[RenderableType]:
    yield heading(
        report.started_at,
        report.machine,
        f"Milliseconds, medians of {report.rounds} rounds; one request at a time; ratio to "
        "aggregated in the round of the same number",
    )
    yield _times(report)
    yield _processor_time(report)
    yield verdict_table(report.verdicts)


def _times(report: VllmReport) -> Table:
    table = columns(
        "Time to first token",
        ("tokens", "mode"),
        ("TTFT", "p90", "ratio", "before", "prefill", "visible", "p90", "after"),
        padding=(0, 0),
        no_wrap=True,
        caption="before: until prefill's first step; visible: transfer, from prefill's last layer "
        "to decode's first step; after: until the token is at the client",
    )
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
    return table


def _processor_time(report: VllmReport) -> Table:
    table = columns("Processor time", ("of",), ("measured",))
    forward = report.forward_thread
    with_requests = f"{forward.requests} requests in the step"
    table.add_row(f"prefill's forward, a layer, {with_requests}", f"{forward.layer:.1f} µs")
    table.add_row(f"before it, each request, {with_requests}", f"{forward.before:.1f} µs")
    for name, cores in report.idle_cores.items():
        table.add_row(f"{name}, idle, share of a core", f"{cores:.1%}")
    for how, cores in report.waiting_cores.items():
        table.add_row(f"both servers while a push waits, {how}", f"{cores:.1%}")
    return table


def _spread(spread: Spread | None) -> tuple[str, str] | tuple[None, None]:
    """Returns median and p90."""
    return (None, None) if spread is None else (f"{spread.p50:.1f}", f"{spread.p90:.1f}")
