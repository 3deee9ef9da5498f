import pytest

from kvxfer.topology.cpu_list import format_cpu_list, parse_cpu_list


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("0", (0,)),
        ("0-1,96-97", (0, 1, 96, 97)),
        ("", ()),
    ],
)
def test_the_kernel_writes_cpus_as_runs(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus
    assert format_cpu_list(cpus) == text


@pytest.mark.parametrize("text", ["\n", "-1", "ffff,ffff", "1-2-3", "all"])
def test_what_is_no_list_of_cpus_has_none(text: str) -> None:
    assert parse_cpu_list(text) == ()


def test_cpus_are_sorted_and_counted_once() -> None:
    assert parse_cpu_list("4,0-1,1") == (0, 1, 4)
    assert format_cpu_list([3, 1, 2]) == "1-3"
