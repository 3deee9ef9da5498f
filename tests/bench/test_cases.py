import pytest

from kvxfer.bench.cases import CASES, cases_by_name
from kvxfer.errors import InvalidArgument


@pytest.mark.parametrize(
    ("name", "kib", "target"),
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
def test_each_page_size_has_its_target(name: str, kib: int, target: float) -> None:
    assert CASES[name].target(kib << 10) == target


def test_cases_come_in_the_order_they_were_named_each_once() -> None:
    assert [case.name for case in cases_by_name(["local", "tcp", "local"])] == ["local", "tcp"]


@pytest.mark.parametrize("names", [["tpc"], [], ["tcp", "verbs"]])
def test_a_fabric_that_is_none_is_refused_with_the_choice(names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="choose from tcp, local, local-cma"):
        cases_by_name(names)
