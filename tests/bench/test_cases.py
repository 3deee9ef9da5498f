import pytest

from kvxfer.bench.cases import cases_by_name
from kvxfer.errors import InvalidArgument


def test_cases_come_in_the_order_they_were_named_each_once() -> None:
    assert [case.name for case in cases_by_name(["local", "tcp", "local"])] == ["local", "tcp"]


@pytest.mark.parametrize("names", [["tpc"], [], ["tcp", "verbs"]])
def test_a_fabric_that_is_none_is_refused_with_the_choice(names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="choose from tcp, local, local-cma"):
        cases_by_name(names)
