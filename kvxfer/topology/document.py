"""The topology and its groups as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer.topology.cpu_list import format_cpu_list
from kvxfer.topology.devices import Location, Topology
from kvxfer.topology.groups import DomainGroup, left_out


def as_document(topology: Topology, groups: Sequence[DomainGroup]) -> dict[str, Any]:
    """Returns `topology` and `groups`. CPUs are lists as the kernel writes them: "0-47,96-143"."""
    out = left_out(topology)
    return {
        "topology": {
            "numa_nodes": [
                {"number": node.number, "cpus": format_cpu_list(node.cpus)}
                for node in topology.numa_nodes
            ],
            "gpus": [
                {"index": gpu.index, "vendor": gpu.vendor, **_location(gpu.location)}
                for gpu in topology.gpus
            ],
            "nics": [
                {
                    "name": nic.name,
                    "driver": nic.driver,
                    "netdev": nic.netdev,
                    "fabric": nic.fabric,
                    "active": nic.active,
                    "left_out": out.get(nic.name),
                    "ports": [
                        {
                            "number": port.number,
                            "link_layer": port.link_layer,
                            "state": port.state,
                            "bits_per_second": port.bits_per_second,
                        }
                        for port in nic.ports
                    ],
                    **_location(nic.location),
                }
                for nic in topology.nics
            ],
        },
        "groups": [
            {
                "gpu": None if group.gpu is None else group.gpu.index,
                "nics": [nic.name for nic in group.nics],
                "distances": [distance.name for distance in group.distances],
                "numa_node": group.numa_node,
                "cpus": format_cpu_list(group.cpus),
                "bits_per_second": group.bits_per_second,
            }
            for group in groups
        ],
    }


def _location(location: Location) -> dict[str, Any]:
    return {
        "pci_path": list(location.pci_path),
        "numa_node": location.numa_node,
        "cpus": format_cpu_list(location.cpus),
    }
