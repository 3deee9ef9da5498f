from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from kvxfer.demo.report import DemoReport, PromptRun

RUN = PromptRun(
    prompt_tokens=100,
    tokens=(1, 2, 3),
    single_process_tokens=(1, 2, 3),
    fabric="local",
    bytes=3_000_000_000,
    pages=1000,
    writes=20,
    transfer_seconds=1.0,
    prefill_seconds=2.0,
    visible_transfer_seconds=0.0005,
    first_token_seconds=2.1,
)


def text_of(report: DemoReport) -> str:
    printed = io.StringIO()
    Console(file=printed, width=120).print(report.table())
    return printed.getvalue()


def test_equal_tokens_are_no_difference() -> None:
    report = DemoReport("demo", [RUN, RUN])
    assert report.difference is None
    assert (report.equal_tokens, report.tokens) == (6, 6)


def test_a_different_token_is_counted_and_placed() -> None:
    wrong = dataclasses.replace(RUN, tokens=(1, 9, 3))
    report = DemoReport("demo", [RUN, wrong])
    assert report.difference == (
        "5 of 6 tokens equal the single-process run; the first difference is token 2 of prompt 2"
    )


def test_missing_and_surplus_tokens_are_differences() -> None:
    for tokens, place in (((1, 2), 3), ((1, 2, 3, 4), 4), ((), 1)):
        report = DemoReport("demo", [dataclasses.replace(RUN, tokens=tokens)])
        assert report.difference is not None
        assert report.difference.endswith(f"token {place} of prompt 1")


def test_the_rate_is_bytes_over_the_time_they_were_under_way() -> None:
    slow = dataclasses.replace(RUN, bytes=1_000_000_000, transfer_seconds=3.0)
    assert DemoReport("demo", [RUN, slow]).gigabytes_per_second == 1.0


def test_the_table_has_every_promised_figure() -> None:
    slow = dataclasses.replace(RUN, fabric="tcp", visible_transfer_seconds=0.0025)
    lines = text_of(DemoReport("demo", [RUN, slow])).splitlines()
    rows = [line.strip("│ ").split("│") for line in lines if "│" in line]
    table = {label.strip(): value.strip() for label, value in rows}
    assert table == {
        "prompts": "2",
        "tokens equal to the single-process run": "6 of 6",
        "bytes moved": "6,000,000,000",
        "pages": "2,000 in 40 writes",
        "GB/s while moving": "3.00",
        "fabric": "local, tcp",
        "time of prefill": "median 2.00 s, max 2.00 s",
        "visible transfer, after the last layer": "median 1.5 ms, max 2.5 ms",
        "time to first token": "median 2.10 s, max 2.10 s",
    }


def test_json_has_the_figures_and_every_run() -> None:
    figures = DemoReport("demo", [RUN]).as_json()
    assert figures["equal_tokens"] == figures["tokens"] == 3
    assert figures["difference"] is None
    assert figures["gigabytes_per_second"] == 3.0
    assert figures["seconds"]["prefill"] == {"median": 2.0, "max": 2.0}
    assert figures["runs"] == [dataclasses.asdict(RUN)]
