"""Hosts for these tests: the trees in tests/data/sysfs, and some made up."""

from __future__ import annotations

from pathlib import Path

from kvxfer.topology import Gpu, Location, Nic, NumaNode, Port, Sysfs, Topology, read_topology

TREES = Path(__file__).parents[1] / "data" / "sysfs"


def recorded(name: str) -> Topology:
    return read_topology(Sysfs.recorded(TREES / name))


def place(path: str = "", numa_node: int | None = 0) -> Location:
    """`path` is written as in sysfs: "pci0000:00/0000:00:01.0"."""
    return Location(tuple(path.split("/")) if path else (), numa_node, cpus_of(numa_node))


def cpus_of(numa_node: int | None) -> tuple[int, ...]:
    return () if numa_node is None else (2 * numa_node, 2 * numa_node + 1)


def nic(name: str, path: str = "", numa_node: int | None = 0, state: str = "ACTIVE") -> Nic:
    port = Port(1, "InfiniBand", state, 400_000_000_000)
    return Nic(name, "mlx5_core", None, (port,), place(path, numa_node))


def topology(gpus: list[Location], nics: list[Nic], numa_nodes: int = 2) -> Topology:
    return Topology(
        tuple(NumaNode(number, cpus_of(number)) for number in range(numa_nodes)),
        tuple(Gpu(index, "nvidia", location) for index, location in enumerate(gpus)),
        tuple(nics),
    )


class SysfsBuilder:
    """Writes a sysfs, laid out as the kernel's, with relative symlinks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, files: dict[str, str]) -> None:
        for path, text in files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        """`target` is relative to the folder that holds the link, and need not exist."""
        link = self.folder / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def pci_device(self, path: str, **files: str) -> str:
        self.write({f"devices/{path}/{name}": text for name, text in files.items()})
        self.link(f"bus/pci/devices/{path.rpartition('/')[2]}", f"../../../devices/{path}")
        return f"devices/{path}"

    def nic(self, device: str, name: str, **port: str) -> str:
        """An RDMA device with one port, below a folder of devices/."""
        nic = f"{device}/infiniband/{name}"
        self.write({f"{nic}/ports/1/{fact}": text for fact, text in port.items()})
        self.link(f"{nic}/device", f"../../../{device.rpartition('/')[2]}")
        self.link(f"class/infiniband/{name}", f"../../{nic}")
        return nic

    def read(self) -> Topology:
        return read_topology(Sysfs(self.folder))
