"""The distance of two devices, in the words of `nvidia-smi topo`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from kvxfer.topology.devices import Location


class Distance(IntEnum):
    """A distance; the smaller is the nearer."""

    PIX = 1  # one PCIe switch
    PXB = 2  # several PCIe switches, but no host bridge
    PHB = 3  # the same host bridge
    NODE = 4  # host bridges of one NUMA node
    SYS = 5  # across NUMA nodes, or unknown


def pcie_distance(one: Location, other: Location) -> Distance:
    """Returns the distance of two devices. Two functions of one card count as behind one switch."""
    shared = common_length(one.pci_path, other.pci_path)
    if shared == 0:
        same = one.numa_node is not None and one.numa_node == other.numa_node
        return Distance.NODE if same else Distance.SYS
    if one.pci_path[shared - 1].startswith("pci"):
        return Distance.PHB
    # Below the part of a switch that both share, each has one more port of that switch. More
    # bridges than that are further switches.
    bridges = max(len(one.pci_path), len(other.pci_path)) - shared - 1
    return Distance.PIX if bridges <= 1 else Distance.PXB


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Counts the parts that two paths have in common from the start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
