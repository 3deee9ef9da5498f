from rich.console import Console, RenderableType

from kvxfer.topology import Gpu, Topology, domain_groups
from kvxfer.topology.drawing import groups_table, topology_tree
from kvxfer.topology.pcie_tree import PcieBranch, pcie_tree
from tests.topology.hosts import nic, place, recorded, topology


def text(drawing: RenderableType) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(drawing)
    return [line.rstrip() for line in capture.get().splitlines()]


def groups(host: Topology) -> list[str]:
    return text(groups_table(host, domain_groups(host)))


def test_a_tree_shows_numa_nodes_switches_and_devices() -> None:
    lines = text(topology_tree(recorded("dgx")))
    assert lines[:4] == [
        "topology",
        "├── NUMA node 0  CPUs 0-55,112-167",
        "│   ├── PCIe switch 0000:16:00.0",
        "│   │   ├── mlx5_0  mlx5_core 0000:18:00.0 ibp24s0  400 Gbit/s InfiniBand",
    ]
    assert lines[4] == "│   │   └── GPU 0  nvidia 0000:1b:00.0"
    assert len(lines) == 1 + 2 + 8 + 16


def test_groups_show_what_serves_each_gpu() -> None:
    assert groups(recorded("p5en"))[2].split() == [
        *("GPU", "0", "rdmap85s0,", "rdmap86s0", "PIX", "400", "Gbit/s", "0-47,96-143")
    ]


def test_nics_that_are_down_or_shared_are_marked() -> None:
    down = nic("mlx5_1", state="DOWN")
    shared = topology([place()] * 2, [nic("mlx5_0"), down])
    assert "mlx5_1  mlx5_core  InfiniBand DOWN  in no group: no active port" in "\n".join(
        text(topology_tree(shared))
    )
    assert [line.count("mlx5_0 (shared)") for line in groups(shared)] == [0, 0, 1, 1]


def test_nics_that_groups_leave_out_say_why() -> None:
    lines = "\n".join(text(topology_tree(recorded("server"))))
    assert "200 Gbit/s Ethernet  in no group:" in lines
    assert "25 Gbit/s Ethernet  in no group:" in lines


def test_a_spare_nic_is_named_below_the_groups() -> None:
    host = topology([place("", 0)] * 2, [nic(f"mlx5_{n}", "", int(n == 2)) for n in range(3)])
    assert groups(host)[-1].strip() == "in no group: mlx5_2"


def test_devices_on_an_unknown_numa_node_are_drawn_too() -> None:
    lines = text(topology_tree(topology([place("", None)], [])))
    assert lines[-2:] == ["└── NUMA node unknown", "    └── GPU 0  nvidia"]


def test_a_laptop_shows_no_gpu_and_no_nic() -> None:
    assert text(topology_tree(recorded("laptop"))) == [
        "topology",
        "├── NUMA node 0  CPUs 0-15",
        "└── no GPU, no RDMA NIC",
    ]
    assert groups(recorded("laptop"))[2].split() == ["NUMA", "node", "0", "none", "0-15"]


SWITCH = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")


def test_a_switch_holds_the_devices_behind_it() -> None:
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


def test_nested_switches_are_nested_and_bridges_without_branches_are_left_out() -> None:
    inner = "/".join(SWITCH) + "/0000:17:01.0/0000:20:00.0"
    one, two = nic("one", f"{inner}/0000:21:00.0/0000:22:00.0"), nic("two", f"{inner}/0000:21:01.0")
    gpu = Gpu(0, "nvidia", place("/".join(SWITCH) + "/0000:17:00.0/0000:18:00.0"))
    lone = nic("lone", "pci0000:26/0000:26:01.0/0000:27:00.0")
    assert pcie_tree([lone, two, one, gpu]) == (
        PcieBranch(SWITCH, (gpu, PcieBranch(tuple(inner.split("/")), (one, two)))),
        lone,
    )


def test_functions_of_one_card_and_devices_without_pci_are_separate() -> None:
    card = "pci0000:15/0000:15:01.0/0000:16:00"
    first, second, same = (nic(name, f"{card}.{name}") for name in "011")
    soft = nic("rxe0")
    tree = pcie_tree([first, second, same, soft])
    assert tree == (soft, PcieBranch(SWITCH[:2], (first, second, same)))
    assert isinstance(tree[1], PcieBranch)
    assert tree[1].kind == "root port"
