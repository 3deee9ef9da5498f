import pytest

from kvxfer.bench.cases import CASES, cases_by_name
from kvxfer.bench.settings import full_settings, quick_settings
from kvxfer.errors import InvalidArgument

MIB = 1 << 20
CASE = (CASES["tcp"],)


def test_a_sweep_fills_the_pool_with_requests() -> None:
    settings = full_settings(cases=CASE, seed=1, request_bytes=64 * MIB)
    assert settings.sweep(4096).requests == 16
    assert settings.draw(4096).requests == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_bytes": (3 << 10,)}, "do not divide"),
        ({"page_bytes": (0,)}, "do not divide"),
        ({"page_bytes": ()}, "no page size"),
        ({"pool_bytes": 128 * MIB}, "larger pool"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    change: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        full_settings(cases=CASE, seed=1, request_bytes=64 * MIB, **change)  # type: ignore[arg-type]


def test_quick_measures_the_same_things_less_often() -> None:
    full = full_settings(cases=CASE, seed=1, request_bytes=64 * MIB)
    quick = quick_settings(cases=CASE, seed=1, request_bytes=64 * MIB)
    assert [each.gap_ns for each in quick.latency] == [each.gap_ns for each in full.latency]
    assert quick.steps < full.steps / 2


def test_cases_come_in_the_order_they_were_named_each_once() -> None:
    assert [case.name for case in cases_by_name(["local", "tcp", "local"])] == ["local", "tcp"]


@pytest.mark.parametrize("names", [["tpc"], [], ["tcp", "verbs"]])
def test_the_error_for_an_unknown_fabric_lists_the_choice(names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="choose from tcp, local, local-cma"):
        cases_by_name(names)
