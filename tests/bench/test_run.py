import json

import msgspec
import pytest

from kvxfer.bench.cases import CASES
from kvxfer.bench.figures import Report
from kvxfer.bench.run import run_bench, run_idle
from kvxfer.bench.settings import CPU_PAGE_BYTES, LatencySettings, Settings

pytestmark = pytest.mark.native

MIB = 1 << 20
SETTINGS = Settings(
    cases=tuple(CASES.values()),
    page_bytes=(1 << 10, 64 << 10),
    request_bytes=MIB,
    pool_bytes=16 * MIB,
    rounds=2,
    seed=20,
    requests=3,
    latency=(
        LatencySettings(gap_ns=0, rounds=2, writes=5),
        LatencySettings(gap_ns=1_000_000, rounds=1, writes=3),
    ),
    connect_rounds=3,
    registration_bytes=16 * MIB,
    registration_rounds=2,
)


@pytest.fixture(scope="module")
def run() -> tuple[Report, list[str]]:
    import asyncio

    steps: list[str] = []
    return asyncio.run(run_bench(SETTINGS, steps.append)), steps


def test_every_case_has_every_figure(run: tuple[Report, list[str]]) -> None:
    report, _ = run
    assert [figures.name for figures in report.cases] == ["tcp", "local", "local-cma"]
    for figures in report.cases:
        assert figures.skipped is None
        assert [each.page_bytes for each in figures.throughput] == list(SETTINGS.page_bytes)
        assert [each.gap_ns for each in figures.latency] == [0, 1_000_000]
        assert [each.page_bytes for each in figures.cpu] == list(CPU_PAGE_BYTES)
        for throughput in figures.throughput:
            for durations in (throughput.engine_ns, throughput.limit_ns):
                timed = SETTINGS.requests - 1
                assert [len(each) for each in durations] == [timed] * SETTINGS.rounds
                assert min(map(min, durations)) > 0
        for latency, asked in zip(figures.latency, SETTINGS.latency, strict=True):
            for samples in (latency.engine_ns, latency.limit_ns):
                assert [len(each) for each in samples] == [asked.writes] * asked.rounds
                assert min(map(min, samples)) > 0
        for cpu in figures.cpu:
            assert cpu.nbytes == SETTINGS.pool_bytes
            assert min(cpu.sender_s_per_gb, cpu.receiver_s_per_gb) >= 0
    assert [figure.fabric for figure in report.connect] == ["tcp", "local"]
    assert [len(figure.engine_ns) for figure in report.connect] == [SETTINGS.connect_rounds] * 2
    assert [each.page_bytes for each in report.checksum] == list(SETTINGS.page_bytes)
    for checksum in report.checksum:
        for sample in (checksum.sum_ns, checksum.copy_ns):
            assert len(sample) == SETTINGS.rounds * SETTINGS.requests
            assert min(sample) > 0
    assert report.registration is not None
    assert report.registration.nbytes == SETTINGS.registration_bytes


def test_progress_is_reported_as_often_as_announced(run: tuple[Report, list[str]]) -> None:
    assert len(run[1]) == SETTINGS.steps


def test_a_report_loses_nothing_as_json(run: tuple[Report, list[str]]) -> None:
    report, _ = run
    text = json.dumps(msgspec.to_builtins(report))
    assert msgspec.json.decode(text, type=Report) == report


async def test_an_idle_pair_is_measured_on_both_sides() -> None:
    steps: list[str] = []
    figures = await run_idle(("tcp", "local"), 0.05, steps.append)
    assert [figure.fabric for figure in figures] == ["tcp", "local"]
    assert all(
        figure.seconds >= 0.05 and min(figure.sender_percent, figure.receiver_percent) >= 0
        for figure in figures
    )
    assert len(steps) == 2
