"""Hosts for these tests: the machines of machines.py, and some made up."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

from kvxfer.topology import Gpu, Location, Nic, NumaNode, Port, Sysfs, Topology, read_topology
from tests.topology import machines


@functools.cache
def recorded(name: str) -> Topology:
    """Returns the topology that is read from one of the machines."""
    with TemporaryDirectory() as folder:
        return read_topology(Sysfs.recorded(machines.write(name, Path(folder))))


def place(path: str = "", numa_node: int | None = 0) -> Location:
    """Returns a location; `path` is like "pci0000:00/0000:00:01.0", as in sysfs."""
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
