"""The PCIe hierarchy, reduced to the bridges where it branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from kvxfer.topology.devices import Gpu, Nic
from kvxfer.topology.distance import common_length

Device: TypeAlias = Gpu | Nic


@dataclass(frozen=True, slots=True)
class PcieBranch:
    """A bridge with several devices or branches below it. `path` runs from the host bridge to it,
    both included."""

    path: tuple[str, ...]
    below: tuple[PcieBranch | Device, ...]

    @property
    def kind(self) -> str:
        if self.path[-1].startswith("pci"):
            return "host bridge"
        return "root port" if len(self.path) == 2 else "PCIe switch"

    @property
    def address(self) -> str:
        return self.path[-1].removeprefix("pci")


def pcie_tree(devices: Sequence[Device], depth: int = 0) -> tuple[PcieBranch | Device, ...]:
    """Makes the tree of `devices`, which share their first `depth` bridges. Bridges without
    branches are left out."""

    def bridges(device: Device) -> tuple[str, ...]:
        return device.location.pci_path[:-1]

    tree: list[PcieBranch | Device] = []
    ordered = sorted(devices, key=lambda device: device.location.pci_path)
    for bridge, group in groupby(ordered, key=lambda device: bridges(device)[depth : depth + 1]):
        beside = list(group)
        if not bridge or len(beside) == 1:
            tree.extend(beside)
            continue
        first, last = bridges(beside[0]), bridges(beside[-1])  # in order: all others lie between
        shared = common_length(first, last)
        tree.append(PcieBranch(first[:shared], pcie_tree(beside, shared)))
    return tuple(tree)
