"""The GPUs, NICs and CPUs of a host that belong together, read from /sys.

A domain group is the NICs that serve one GPU (or one NUMA node), driven by one worker thread.
"""

from __future__ import annotations

from kvxfer.topology.devices import Gpu, Location, Nic, NumaNode, Port, Topology
from kvxfer.topology.discovery import read_topology
from kvxfer.topology.distance import Distance, pcie_distance
from kvxfer.topology.groups import DomainGroup, domain_groups, host_groups, left_out
from kvxfer.topology.local import NicChoice, choose_nics, closed_nics, local_group
from kvxfer.topology.sysfs import Sysfs

__all__ = [
    "Distance",
    "DomainGroup",
    "Gpu",
    "Location",
    "Nic",
    "NicChoice",
    "NumaNode",
    "Port",
    "Sysfs",
    "Topology",
    "choose_nics",
    "closed_nics",
    "domain_groups",
    "host_groups",
    "left_out",
    "local_group",
    "pcie_distance",
    "read_topology",
]
