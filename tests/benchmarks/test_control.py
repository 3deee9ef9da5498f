import pytest
from rich.console import Console

from benchmarks.control.empty import PATH
from benchmarks.control.figures import (
    ControlReport,
    RegistryFigures,
    RouteFigure,
    load_figure,
    route_figure,
)
from benchmarks.control.generator import Answers, request, send
from benchmarks.control.servers import empty_server
from benchmarks.control.table import report_tables
from benchmarks.cpu import cpu_seconds
from kvxfer.bench.machine import this_machine
from kvxfer.bench.targets import CONTROL, OPEN_TRANSFER

TARGET = CONTROL["embedded"][OPEN_TRANSFER]


def answers(per_second: int) -> Answers:
    return Answers(seconds=1.0, latencies=[0.002] * per_second)


def figure(*rounds: int) -> RouteFigure:
    """Returns a figure of rounds with these requests a second, and 100 of the empty route."""
    empty = [answers(100)] * len(rounds)
    return route_figure(OPEN_TRANSFER, [answers(each) for each in rounds], empty, TARGET)


def report(route: RouteFigure) -> ControlReport:
    figures = RegistryFigures("embedded", 1, [route], load_figure([answers(100)]), 1, 1, 1, None)
    return ControlReport("2026-11-24", this_machine(), 16, 1, 1.0, [figures])


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    route = figure(20, 90, 40)
    assert (route.ratio, route.least_ratio, route.met) == (0.4, 0.2, True)


def test_a_missed_target_fails_the_run() -> None:
    assert [report(figure(each)).passed for each in (31, 29)] == [True, False]


def test_a_route_stands_beside_its_target() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        for table in report_tables(report(figure(31))):
            console.print(table)
    for text in (OPEN_TRANSFER, "0.31", str(TARGET)):
        assert text in capture.get()


@pytest.mark.native
def test_the_empty_route_answers_and_its_processor_time_is_known() -> None:
    with empty_server() as server:
        before = cpu_seconds(server)
        answered = send(server.port, [request("POST", PATH)] * 300, 4, None).expect(200)
        assert len(answered.latencies) == 300
        assert cpu_seconds(server) >= before
