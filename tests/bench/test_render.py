from rich.console import Console

from kvxfer.bench.render import judged, verdict_table
from kvxfer.bench.targets import IDLE, VISIBLE_TRANSFER, judge


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
