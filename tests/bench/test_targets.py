from dataclasses import replace

import pytest
from rich.console import Console

from kvxfer.bench.cases import CASES
from kvxfer.bench.render import judged, verdict_table
from kvxfer.bench.targets import (
    CONTROL,
    IDLE,
    TARGETS,
    VISIBLE_TRANSFER,
    Direction,
    judge,
    throughput_target,
)


@pytest.mark.parametrize(
    ("name", "kib", "bound"),
    [
        ("tcp", 1, 0.50),
        ("tcp", 4, 0.70),
        ("tcp", 8, 0.70),
        ("tcp", 16, 0.85),
        ("tcp", 256, 0.85),
        ("local", 1, 0.80),
        ("local", 4, 0.80),
        ("local", 16, 0.85),
        ("local", 256, 0.85),
        ("local-cma", 1, 0.90),
        ("local-cma", 256, 0.90),
    ],
)
def test_each_page_size_has_its_target(name: str, kib: int, bound: float) -> None:
    assert throughput_target(CASES[name], kib << 10).bound == bound


@pytest.mark.parametrize(
    ("direction", "missed", "met"),
    [(Direction.AT_LEAST, 0.49, 0.51), (Direction.AT_MOST, 0.51, 0.49)],
)
def test_the_bound_itself_meets_its_target(direction: Direction, missed: float, met: float) -> None:
    target = replace(VISIBLE_TRANSFER, direction=direction, bound=0.5)
    assert [judge(figure, target).met for figure in (missed, 0.5, met)] == [False, True, True]


def test_a_bound_shows_its_direction_and_unit() -> None:
    assert str(IDLE) == "≤ 0.5 %"
    assert str(replace(IDLE, unit="", direction=Direction.AT_LEAST)) == "≥ 0.50"


def test_each_target_has_its_own_name() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)


def test_only_a_ratio_is_measured_against_something() -> None:
    assert all(bool(target.against) is not bool(target.unit) for target in TARGETS)


def test_every_call_of_the_control_plane_keeps_a_required_part_of_an_empty_route() -> None:
    targets = [target for routes in CONTROL.values() for target in routes.values()]
    assert all(each.required and each.direction is Direction.AT_LEAST for each in targets)
    assert min(each.bound for each in targets) >= 0.30


def test_a_missed_target_is_red() -> None:
    bound = VISIBLE_TRANSFER.bound
    assert judged(bound, VISIBLE_TRANSFER, "as it is shown").style == "green"
    missed = judged(bound + 0.01, VISIBLE_TRANSFER, "as it is shown")
    assert (missed.plain, missed.style) == ("as it is shown", "bold red")


def test_a_figure_stands_beside_its_target_in_the_same_unit() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(verdict_table([judge(0.25, VISIBLE_TRANSFER), judge(0.4, IDLE)]))
    for text in (VISIBLE_TRANSFER.against, "0.25", str(VISIBLE_TRANSFER), "0.4 %", str(IDLE)):
        assert text in capture.get()
