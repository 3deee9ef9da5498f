from kvxfer.topology import Gpu
from kvxfer.topology.pcie_tree import PcieBranch, pcie_tree
from tests.topology.hosts import nic, place, recorded

SWITCH = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")


def test_a_switch_holds_what_is_behind_it() -> None:
    found = recorded("dgx")
    (branch,) = pcie_tree([found.gpus[0], found.nics[0]])
    assert branch == PcieBranch(SWITCH, (found.nics[0], found.gpus[0]))
    assert (branch.kind, branch.address) == ("PCIe switch", "0000:16:00.0")


def test_switches_of_one_host_bridge_are_below_it() -> None:
    found = recorded("p5en")
    (bridge,) = pcie_tree([*found.gpus[:2], *found.nics[:4]])
    assert isinstance(bridge, PcieBranch)
    assert (bridge.kind, bridge.address) == ("host bridge", "0000:44")
    assert [len(each.below) for each in bridge.below if isinstance(each, PcieBranch)] == [3, 3]


def test_nested_switches_are_nested_and_bridges_where_nothing_parts_are_left_out() -> None:
    inner = "/".join(SWITCH) + "/0000:17:01.0/0000:20:00.0"
    one, two = nic("one", f"{inner}/0000:21:00.0/0000:22:00.0"), nic("two", f"{inner}/0000:21:01.0")
    gpu = Gpu(0, "nvidia", place("/".join(SWITCH) + "/0000:17:00.0/0000:18:00.0"))
    lone = nic("lone", "pci0000:26/0000:26:01.0/0000:27:00.0")
    assert pcie_tree([lone, two, one, gpu]) == (
        PcieBranch(SWITCH, (gpu, PcieBranch(tuple(inner.split("/")), (one, two)))),
        lone,
    )


def test_functions_of_one_card_and_devices_without_pci_are_told_apart() -> None:
    card = "pci0000:15/0000:15:01.0/0000:16:00"
    first, second, same = (nic(name, f"{card}.{name}") for name in "011")
    soft = nic("rxe0")
    tree = pcie_tree([first, second, same, soft])
    assert tree == (soft, PcieBranch(SWITCH[:2], (first, second, same)))
    assert isinstance(tree[1], PcieBranch)
    assert tree[1].kind == "root port"
