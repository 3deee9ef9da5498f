from __future__ import annotations

import pytest
import torch
from rich.console import Console

from benchmarks.weights.figures import Sample, WeightsReport, figures_of, verdicts_of
from benchmarks.weights.model import content, held_by, model_of, pieces, wanted_by
from benchmarks.weights.run import Settings, run_bench
from benchmarks.weights.table import report_tables
from kvxfer.bench.machine import this_machine
from kvxfer.bench.targets import WEIGHTS

BYTES = 2 * 10**9
SECONDS = {"update": 1.0, "raw": 0.9, "gather": 6.0, "send": 1.2}


def samples(**changed: float) -> list[Sample]:
    """Returns samples of three rounds; in the second, all ways are ten times as slow."""
    seconds = {**SECONDS, **changed}
    return [
        Sample(
            fabric,
            digests,
            number,
            way,
            seconds[way] * (10 if number == 1 else 1),
            2.0,
            0.5 if way == "update" else None,
        )
        for fabric in ("tcp", "local")
        for digests in (False, True)
        for number in range(3)
        for way in (("update", "raw") if digests else SECONDS)
    ]


def report(taken: list[Sample]) -> WeightsReport:
    figures = figures_of(taken, BYTES)
    return WeightsReport(
        *("2026-11-28", this_machine(), 12, BYTES, 4, 2, 3),
        *(figures, verdicts_of(figures), taken),
    )


def test_a_ratio_compares_the_update_with_another_way_within_a_round() -> None:
    [figure, *_] = figures_of(samples(), BYTES)
    assert (figure.seconds, figure.stage_seconds) == (1.0, 0.5)
    assert figure.gb_per_s["update"] == 2.0
    assert figure.ratios == pytest.approx({"raw": 0.9, "gather": 6.0, "send": 1.2})


def test_every_target_has_its_verdict() -> None:
    verdicts = {each.target.name: each.met for each in report(samples()).verdicts}
    assert verdicts == {
        target.name: way != "send" for of_it in WEIGHTS.values() for way, target in of_it.items()
    }
    fast = report(samples(send=1.6, raw=0.4)).verdicts
    assert {each.target for each in fast if not each.met} == {
        target for of_it in WEIGHTS.values() for way, target in of_it.items() if way == "raw"
    }


def test_the_tables_show_every_way_and_target() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        for table in report_tables(report(samples())):
            console.print(table)
    for text in (
        "isend and irecv",
        "2.00",
        *(each.target.name for each in report(samples()).verdicts),
    ):
        assert text in capture.get()


def test_the_pieces_of_all_senders_are_what_a_receiver_wants() -> None:
    model = model_of(10**7)
    for receiver in range(2):
        wanted = wanted_by(model, receiver, 2)
        found = {
            each.name: torch.zeros(each.shape, dtype=torch.bfloat16) for each in wanted.parameters
        }
        for sender in range(4):
            held = held_by(model, sender, 4)
            boxes = {each.name: content(each, n) for n, each in enumerate(held.parameters)}
            for each in pieces(held, wanted):
                found[each.name][each.wanted] = boxes[each.name][each.held]
        for number, each in enumerate(wanted.parameters):
            assert torch.equal(found[each.name], content(each, number))


@pytest.mark.native
def test_a_small_run_measures_every_way_and_checks_the_bytes() -> None:
    found = run_bench(Settings(gb=0.008, rounds=1), lambda _: None)
    assert [(each.fabric, each.digests) for each in found.figures] == list(WEIGHTS)
    assert [list(each.gb_per_s) for each in found.figures] == [
        ["update", "raw", "gather", "send"],
        ["update", "raw"],
    ] * 2
    assert len(found.verdicts) == 8
