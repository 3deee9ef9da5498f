from rich.console import Console, RenderableType

from kvxfer.topology import Topology, domain_groups
from kvxfer.topology.drawing import groups_table, topology_tree
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
    assert "mlx5_1  mlx5_core  InfiniBand DOWN  in no group" in "\n".join(
        text(topology_tree(shared))
    )
    assert [line.count("mlx5_0 (shared)") for line in groups(shared)] == [0, 0, 1, 1]


def test_a_spare_nic_is_named_below_the_groups() -> None:
    host = topology([place("", 0)] * 2, [nic(f"mlx5_{n}", "", int(n == 2)) for n in range(3)])
    assert groups(host)[-1].strip() == "in no group: mlx5_2"


def test_devices_on_an_unknown_numa_node_are_drawn_too() -> None:
    lines = text(topology_tree(topology([place("", None)], [])))
    assert lines[-2:] == ["└── NUMA node unknown", "    └── GPU 0  nvidia"]


def test_a_laptop_is_told_that_it_has_neither() -> None:
    assert text(topology_tree(recorded("laptop"))) == [
        "topology",
        "├── NUMA node 0  CPUs 0-15",
        "└── no GPU, no RDMA NIC",
    ]
    assert groups(recorded("laptop"))[2].split() == ["NUMA", "node", "0", "none", "0-15"]
