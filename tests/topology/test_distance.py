import pytest

from kvxfer.topology import Distance, pcie_distance
from tests.topology.hosts import place, recorded

ROOT = "pci0000:15"
PORT = f"{ROOT}/0000:15:01.0"
SWITCH = f"{PORT}/0000:16:00.0"  # the upstream port of a switch
NESTED = f"{SWITCH}/0000:17:01.0/0000:20:00.0"  # the upstream port of a switch below it


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        (f"{SWITCH}/0000:17:00.0/0000:18:00.0", f"{SWITCH}/0000:17:02.0/0000:1b:00.0", "PIX"),
        (f"{PORT}/0000:16:00.0", f"{PORT}/0000:16:00.1", "PIX"),  # two functions of one card
        (f"{SWITCH}/0000:17:00.0/0000:18:00.0", f"{NESTED}/0000:21:00.0/0000:22:00.0", "PXB"),
        (f"{NESTED}/0000:21:00.0/0000:22:00.0", f"{NESTED}/0000:21:01.0/0000:23:00.0", "PIX"),
        (f"{PORT}/0000:16:00.0", f"{ROOT}/0000:15:02.0/0000:20:00.0", "PHB"),
        (f"{SWITCH}/0000:17:00.0/0000:18:00.0", f"{ROOT}/0000:15:02.0/0000:20:00.0", "PHB"),
        (f"{ROOT}/0000:15:01.0", f"{ROOT}/0000:15:02.0", "PHB"),  # some hypervisors show this
        (f"{PORT}/0000:16:00.0", "pci0000:26/0000:26:01.0/0000:27:00.0", "NODE"),
        (f"{PORT}/0000:16:00.0", f"{PORT}/0000:16:00.0", "PIX"),
        ("", f"{PORT}/0000:16:00.0", "NODE"),  # soft RoCE
    ],
)
def test_distance_is_what_lies_between(one: str, other: str, distance: str) -> None:
    assert pcie_distance(place(one), place(other)) is Distance[distance]
    assert pcie_distance(place(other), place(one)) is Distance[distance]


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [(0, 0, "NODE"), (0, 1, "SYS"), (None, 0, "SYS"), (None, None, "SYS")],
)
def test_between_host_bridges_numa_decides_and_unknown_is_far(
    one: int | None, other: int | None, distance: str
) -> None:
    places = place(f"{ROOT}/0000:15:01.0", one), place("pci0000:26/0000:26:01.0", other)
    assert pcie_distance(*places) is Distance[distance]


def test_below_one_host_bridge_numa_does_not_matter() -> None:
    places = place(f"{ROOT}/0000:15:01.0", None), place(f"{ROOT}/0000:15:02.0", None)
    assert pcie_distance(*places) is Distance.PHB


def test_distances_are_ordered_from_near_to_far() -> None:
    assert [each.name for each in sorted(Distance)] == ["PIX", "PXB", "PHB", "NODE", "SYS"]


@pytest.mark.parametrize(
    ("machine", "row"),
    [
        ("dgx", ["PIX"] + ["NODE"] * 3 + ["SYS"] * 4),
        ("p5en", ["PIX"] * 2 + ["PHB"] * 2 + ["NODE"] * 4 + ["SYS"] * 8),
    ],
)
def test_distances_from_the_first_gpu_of_a_machine_to_its_nics(
    machine: str, row: list[str]
) -> None:
    found = recorded(machine)
    seen = [pcie_distance(found.gpus[0].location, nic.location).name for nic in found.nics]
    assert seen == row
