from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.router.client import Answer, connected
from benchmarks.router.figures import (
    DECODE,
    OPEN,
    PASS_THROUGH,
    PREFILL,
    ROUTER,
    TOKENIZE,
    Round,
    RouterReport,
    added_ms,
    latency,
    stream_figure,
    verdicts_of,
)
from benchmarks.router.fleet import RouterFleet
from benchmarks.router.requests import completion
from benchmarks.router.run import Settings, run_bench
from benchmarks.router.table import report_tables
from kvxfer.bench.machine import this_machine
from kvxfer.bench.targets import ROUTER_FIRST_BYTE, ROUTER_STREAM, ROUTER_TOKEN
from verify.processes.cores import on_cores, split_cores

TARGETS = [ROUTER_TOKEN, ROUTER_STREAM, ROUTER_FIRST_BYTE]
SECONDS = {
    ROUTER: 0.0040,
    PASS_THROUGH: 0.0012,
    DECODE: 0.0003,
    PREFILL: 0.0002,
    TOKENIZE: 0.0004,
    OPEN: 0.0016,
}


def streams(token_us: float, whole_us: float) -> Round:
    """A round of 1,000 tokens, half of them while all streams were under way."""
    return Round(
        seconds=2.0,
        tokens=1000,
        parts=500,
        cpu_seconds=whole_us / 1e3,
        steady_tokens=500,
        steady_cpu_seconds=token_us / 2e3,
        client_cpu_seconds=0.5,
    )


def report(*, token_us: float = 50, whole_us: float = 80, seconds: float = 0.0) -> RouterReport:
    """Returns a report: a pass-through of 40 and 60 µs, and `seconds` added to the first byte."""
    rounds = {
        ROUTER: [streams(token_us, whole_us)],
        PASS_THROUGH: [streams(40, 60)],
    }
    taken = {**SECONDS, ROUTER: SECONDS[ROUTER] + seconds}
    latencies = {name: latency([each]) for name, each in taken.items()}
    figures = {name: stream_figure(each, 50) for name, each in rounds.items()}
    return RouterReport(
        *("2026-11-29", this_machine(), 1, 64, 256, 50),
        *(figures, latencies, verdicts_of(rounds, latencies)),
    )


def test_a_figure_is_the_median_of_its_rounds() -> None:
    figure = stream_figure([streams(50, 80), streams(500, 800), streams(40, 60)], 50)
    assert (figure.token_us, figure.whole_us) == pytest.approx((50, 80))
    assert figure.streams_per_core == pytest.approx(250)  # each needs 4 ms a second
    assert figure.tokens_per_part == 2.0
    assert figure.core_share == pytest.approx(0.04)
    assert figure.client_cores == 0.25


def test_a_ratio_is_the_median_of_neighbouring_rounds() -> None:
    rounds = {
        ROUTER: [streams(60, 90), streams(500, 900), streams(40, 60)],
        PASS_THROUGH: [streams(40, 60), streams(500, 900), streams(20, 20)],
    }
    latencies = {name: latency([each]) for name, each in SECONDS.items()}
    token, stream, _ = (each.figure for each in verdicts_of(rounds, latencies))
    assert (token, stream) == pytest.approx((1.5, 1.5))


def test_the_added_time_to_the_first_byte_excludes_the_answers_of_others() -> None:
    # Router: 4.0 - 1.6 - 0.4 - 0.3 (the slower worker). Pass-through: 1.2 - 0.3.
    assert added_ms({name: latency([each]) for name, each in SECONDS.items()}) == pytest.approx(0.8)


def test_a_missed_target_fails_the_run() -> None:
    assert report().passed
    missed = [report(token_us=61), report(whole_us=91), report(seconds=0.0003)]
    assert [[each.target for each in run.verdicts if not each.met] for run in missed] == [
        [target] for target in TARGETS
    ]
    assert not any(each.passed for each in missed)


def test_the_tables_show_every_server_and_target() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        for table in report_tables(report()):
            console.print(table)
    for text in (*SECONDS, "250", "1.33", *(each.name for each in TARGETS)):
        assert text in capture.get()


def test_an_answer_that_lacks_a_token_ends_the_run() -> None:
    answer = Answer(status=200, parts=[b'data: {"text":" a"}\n\n', b"data: [DONE]\n\n"])
    assert answer.expect(200, 1) is answer
    for status, tokens in ((200, 2), (503, 1)):
        with pytest.raises(RuntimeError, match="an answer was 200"):
            answer.expect(status, tokens)


@pytest.mark.native
async def test_the_pass_through_and_the_router_pass_on_the_same_events() -> None:
    core, others = split_cores()
    with on_cores(others), RouterFleet(200, core) as fleet:
        answers = []
        for name in (ROUTER, PASS_THROUGH):
            async with connected(fleet.running[name].url, 1) as (connection,):
                before = fleet.cpu_seconds(name)
                answers.append((await connection.ask(completion(5))).expect(200, 5))
                assert fleet.cpu_seconds(name) > before
    assert answers[0].body == answers[1].body


@pytest.mark.native
def test_a_small_run_measures_both_servers() -> None:
    found = run_bench(Settings(rounds=1, streams=2, tokens=128, requests=2), lambda _: None)
    assert [*found.figures] == [ROUTER, PASS_THROUGH]
    assert {*found.latencies} == {*SECONDS}
    assert [each.target for each in found.verdicts] == TARGETS
    assert all(each.token_us > 0 and each.tokens_per_part >= 1 for each in found.figures.values())
