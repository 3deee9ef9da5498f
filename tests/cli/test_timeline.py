"""The drawing of a trace: the order of the spans, the place of the bars, merged spans."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvxfer.cli.timeline import timeline
from kvxfer.traces import SpanEvent, Trace, TraceSpan


def span(number: int, parent: int | None, name: str, start: float, end: float, **more: Any) -> Any:
    return TraceSpan(
        trace_id="t",
        span_id=str(number),
        parent_id=None if parent is None else str(parent),
        name=name,
        service="worker",
        instance_id=more.pop("at", ""),
        start=1000 + start,
        end=1000 + end,
        **more,
    )


def drawn(*spans: TraceSpan, width: int = 112, every: bool = False) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(timeline(Trace(request_id="r", spans=spans), width=width, every=every))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_each_span_is_below_the_one_that_called_it_and_at_its_time() -> None:
    head, root, late, early = drawn(
        span(1, None, "request", 0, 0.4),
        span(2, 1, "decode", 0.2, 0.4, at="decode-0"),
        span(3, 2, "kv.receive", 0.2, 0.33, at="decode-0"),
    )
    assert head.split() == ["span", "at", "start", "ms", "0", "400.0", "ms"]
    assert root.split() == ["request", "worker", "0.0", "400.0", "━" * 40]
    assert late.split() == ["decode", "decode-0", "200.0", "200.0", "━" * 20]
    assert early.startswith("    kv.receive")
    assert early.split()[1:4] == ["decode-0", "200.0", "130.0"]
    assert root.endswith("━" * 40)
    begin = root.index("━")
    assert late.index("━") == begin + 20
    assert early.rindex("━") == begin + 33


def test_events_are_marked() -> None:
    _, root = drawn(
        span(1, None, "decode", 0, 1, events=(SpanEvent(name="first token", at=1000.5),))
    )
    assert root.split()[-1] == "━" * 20 + "◆" + "━" * 19


def test_many_spans_of_one_name_are_one_line_unless_all_are_asked_for() -> None:
    writes = [
        span(n, 0, "kv.write", n, n + 0.1, attributes={"kvxfer.layer": n}) for n in range(1, 9)
    ]
    spans = [span(0, None, "kv.send", 0, 10), *writes]
    _, _, together = drawn(*spans)
    assert together.split()[:4] == ["kv.write", "x", "8", "worker"]
    assert together.count(" ━") == 8
    assert [line.split()[:2] for line in drawn(*spans, every=True)[2:]] == [
        ["kv.write", str(layer)] for layer in range(1, 9)
    ]


def test_a_failed_span_shows_its_error_even_without_its_caller() -> None:
    _, orphan, why = drawn(span(5, 4, "kv.receive", 0, 1, error="transfer t-1: lost"))
    assert orphan.split()[0] == "kv.receive"
    assert why.strip() == "kv.receive: transfer t-1: lost"
