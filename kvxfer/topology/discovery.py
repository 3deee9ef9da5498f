"""Reads a host's topology from its sysfs. A value that is missing there is missing in the result:
nothing here raises."""

from __future__ import annotations

import re

from kvxfer.topology.cpu_list import parse_cpu_list
from kvxfer.topology.devices import Gpu, Location, Nic, NumaNode, Port, Topology
from kvxfer.topology.sysfs import Sysfs

_PCI_DEVICES = "bus/pci/devices"
_INFINIBAND = "class/infiniband"
_NODES = "devices/system/node"
_PCI_PART = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RATE = re.compile(r"(\d+(?:\.\d+)?) *Gb/sec")

# Vendor id: name, PCI classes (base and sub class). AMD's Instinct are display controllers or
# processing accelerators.
_GPU_VENDORS = {
    0x10DE: ("nvidia", (0x0300, 0x0302)),
    0x1002: ("amd", (0x0300, 0x0302, 0x0380, 0x1200)),
}


def read_topology(sysfs: Sysfs) -> Topology:
    nodes = _numa_nodes(sysfs)
    return Topology(nodes, _gpus(sysfs, nodes), _nics(sysfs, nodes), _default_route(sysfs))


def _numa_nodes(sysfs: Sysfs) -> tuple[NumaNode, ...]:
    nodes = []
    for name in sysfs.names(_NODES):
        number = name.removeprefix("node")
        if number != name and number.isdecimal():
            cpus = parse_cpu_list(sysfs.text(f"{_NODES}/{name}/cpulist") or "")
            nodes.append(NumaNode(int(number), cpus))
    # A kernel without NUMA is one node.
    online = parse_cpu_list(sysfs.text("devices/system/cpu/online") or "")
    return tuple(sorted(nodes, key=lambda node: node.number)) or (NumaNode(0, online),)


def _gpus(sysfs: Sysfs, nodes: tuple[NumaNode, ...]) -> tuple[Gpu, ...]:
    found = []
    for address in sysfs.names(_PCI_DEVICES):
        device = f"{_PCI_DEVICES}/{address}"
        vendor, classes = _GPU_VENDORS.get(_hexadecimal(sysfs.text(f"{device}/vendor")), ("", ()))
        if _hexadecimal(sysfs.text(f"{device}/class")) >> 8 in classes:
            location = _location(sysfs, device, nodes)
            found.append((vendor != "nvidia", _pci_order(address), vendor, location))
    found.sort(key=lambda gpu: gpu[:2])
    return tuple(Gpu(index, vendor, place) for index, (*_, vendor, place) in enumerate(found))


def _nics(sysfs: Sysfs, nodes: tuple[NumaNode, ...]) -> tuple[Nic, ...]:
    found = []
    for name in sysfs.names(_INFINIBAND):
        nic = f"{_INFINIBAND}/{name}"
        found.append(
            Nic(
                name,
                sysfs.link_name(f"{nic}/device/driver"),
                _netdev(sysfs, nic),
                _ports(sysfs, nic),
                _location(sysfs, f"{nic}/device", nodes),
            )
        )
    return tuple(sorted(found, key=lambda nic: _natural_order(nic.name)))


def _ports(sysfs: Sysfs, nic: str) -> tuple[Port, ...]:
    ports = []
    for name in filter(str.isdecimal, sysfs.names(f"{nic}/ports")):
        port = f"{nic}/ports/{name}"
        rate = _RATE.match(sysfs.text(f"{port}/rate") or "")
        state = sysfs.text(f"{port}/state") or "unknown"  # "4: ACTIVE"
        ports.append(
            Port(
                int(name),
                sysfs.text(f"{port}/link_layer") or "unknown",
                state.rpartition(": ")[2],
                round(float(rate[1]) * 1e9) if rate else 0,
            )
        )
    return tuple(sorted(ports, key=lambda port: port.number))


def _netdev(sysfs: Sysfs, nic: str) -> str | None:
    # The port's own interface is preferred: the PCI device may also have representors.
    for port in sysfs.names(f"{nic}/ports"):
        if name := sysfs.text(f"{nic}/ports/{port}/gid_attrs/ndevs/0"):
            return name
    names = sysfs.names(f"{nic}/device/net")
    return names[0] if names else sysfs.text(f"{nic}/parent")  # soft RoCE


def _default_route(sysfs: Sysfs) -> str | None:
    found = []
    for line in sysfs.routes.splitlines():
        match line.split():  # interface, destination, gateway, flags, counts, metric, mask, ...
            case [interface, "00000000", _, _, _, _, metric, "00000000", *_] if metric.isdecimal():
                found.append((int(metric), interface))
    return min(found)[1] if found else None


def _location(sysfs: Sysfs, device: str, nodes: tuple[NumaNode, ...]) -> Location:
    # Leaves out the platform above a host bridge, and a subfunction below its NIC.
    path = tuple(
        part for part in sysfs.device_path(device) or () if _PCI_PART.fullmatch(part) is not None
    )
    numbers = {node.number: node for node in nodes}
    text = sysfs.text(f"{device}/numa_node") or ""
    node = numbers.get(int(text)) if text.isdecimal() else None  # -1: the firmware does not say
    if node is None and len(nodes) == 1:
        node = nodes[0]
    cpus = parse_cpu_list(sysfs.text(f"{device}/local_cpulist") or "")
    if node is None:
        return Location(path, None, cpus)
    return Location(path, node.number, cpus or node.cpus)


def _hexadecimal(text: str | None) -> int:
    try:
        return int(text or "", 16)
    except ValueError:
        return -1


def _pci_order(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.findall(r"[0-9a-f]+", address))


def _natural_order(name: str) -> list[tuple[str, int]]:
    """Returns a sort key by which mlx5_10 comes after mlx5_9."""
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", name)]
