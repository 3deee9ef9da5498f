import pytest
from rich.console import Console

from benchmarks.vllm.figures import (
    QUIET,
    ForwardThread,
    Mode,
    Sample,
    Split,
    VllmReport,
    figures_of,
    verdicts_of,
)
from benchmarks.vllm.table import report_tables
from kvxfer.bench.machine import this_machine
from kvxfer.bench.targets import (
    FIRST_TOKEN,
    IDLE_VLLM,
    LAYER,
    VISIBLE_TRANSFER,
    VLLM_PROMPT_TOKENS,
    WAITING_VLLM,
)

FIRST_TOKEN_MS = {Mode.AGGREGATED: 500.0, Mode.PUSH: 540.0, Mode.PULL: 600.0, Mode.NIXL: 900.0}


def report(*, visible: float, layer: float = 10.0) -> VllmReport:
    """Returns a report: the visible transfer of push takes `visible` of NixlConnector's."""
    visible_ms = {Mode.PUSH: 40.0 * visible, Mode.PULL: 30.0, Mode.NIXL: 40.0}
    samples = [
        Sample(
            number,
            VLLM_PROMPT_TOKENS,
            mode,
            ttft,
            Split(1.0, 2.0, visible_ms[mode], 3.0) if mode in visible_ms else None,
        )
        for number in range(3)
        for mode, ttft in FIRST_TOKEN_MS.items()
    ]
    forward = ForwardThread(64, layer, 7.0)
    idle = {Mode.AGGREGATED.value: 0.02, "prefill": 0.025, "decode": 0.027}
    waiting = {"workers wait": 1.0, QUIET: 0.2}
    verdicts = verdicts_of(samples, forward, idle, waiting)
    return VllmReport(
        *("2026-11-24", this_machine(), 3, figures_of(samples)),
        *(forward, idle, waiting, samples, verdicts),
    )


def test_every_target_has_its_figure() -> None:
    figures = {each.target: each.figure for each in report(visible=0.25).verdicts}
    assert figures == {
        VISIBLE_TRANSFER: pytest.approx(0.25),
        FIRST_TOKEN: pytest.approx(0.9),
        LAYER: 10.0,
        IDLE_VLLM: pytest.approx(0.7),  # the server that takes more
        WAITING_VLLM: pytest.approx(20.0),
    }


def test_only_a_missed_target_that_is_required_fails_the_run() -> None:
    assert report(visible=0.4).passed
    assert not report(visible=0.6).passed
    slow = report(visible=0.4, layer=30.0)
    assert slow.passed
    assert [each.target for each in slow.verdicts if not each.met] == [LAYER]


def test_the_tables_show_every_target() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        for table in report_tables(report(visible=0.25)):
            console.print(table)
    for verdict in report(visible=0.25).verdicts:
        assert verdict.target.name in capture.get()
        assert str(verdict.target) in capture.get()
