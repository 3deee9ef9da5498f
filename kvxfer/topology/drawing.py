"""The topology and its groups, drawn for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvxfer.topology.cpu_list import format_cpu_list
from kvxfer.topology.devices import Gpu, Nic, Topology
from kvxfer.topology.groups import DomainGroup, left_out, spare_nics
from kvxfer.topology.pcie_tree import Device, PcieBranch, pcie_tree


def topology_tree(topology: Topology) -> Tree:
    """Draws NUMA nodes, the bridges where PCIe branches, and the devices below them."""
    tree = Tree(Text("topology", "bold"))
    devices: list[Device] = [*topology.gpus, *topology.nics]
    out = left_out(topology)
    for node in topology.numa_nodes:
        cpus = f"CPUs {format_cpu_list(node.cpus)}" if node.cpus else "no CPUs"
        label = Text.assemble(f"NUMA node {node.number}", (f"  {cpus}", "dim"))
        beside = [device for device in devices if device.location.numa_node == node.number]
        _grow(tree.add(label), pcie_tree(beside), out)
    lost = [device for device in devices if device.location.numa_node is None]
    if lost:
        _grow(tree.add(Text("NUMA node unknown", "yellow")), pcie_tree(lost), out)
    if not devices:
        tree.add(Text("no GPU, no RDMA NIC", "dim"))
    return tree


def groups_table(topology: Topology, groups: Sequence[DomainGroup]) -> Table:
    """Draws one row per group, and below them the NICs that are in none."""
    table = Table(box=None, title_justify="left", title=Text("domain groups", "bold"))
    for heading in ("for", "NICs", "distance", "link", "CPUs of the worker thread"):
        table.add_column(heading, overflow="fold")
    users = [nic.name for group in groups for nic in group.nics]
    for group in groups:
        names = (
            f"{nic.name} (shared)" if users.count(nic.name) > 1 else nic.name for nic in group.nics
        )
        table.add_row(
            _served(group),
            Text(", ".join(names) or "none"),
            max(group.distances).name if group.distances else "",
            _speed(group.bits_per_second) if group.nics else "",
            format_cpu_list(group.cpus),
        )
    spare = ", ".join(nic.name for nic in spare_nics(topology, groups))
    if spare:
        table.caption = Text(f"in no group: {spare}", "dim")
        table.caption_justify = "left"
    return table


def _served(group: DomainGroup) -> str:
    if group.gpu is not None:
        return f"GPU {group.gpu.index}"
    return "host" if group.numa_node is None else f"NUMA node {group.numa_node}"


def _grow(tree: Tree, below: Sequence[PcieBranch | Device], out: Mapping[str, str]) -> None:
    for each in below:
        if isinstance(each, PcieBranch):
            _grow(tree.add(Text(f"{each.kind} {each.address}")), each.below, out)
        elif isinstance(each, Gpu):
            address = each.location.pci_address or ""
            tree.add(
                Text.assemble((f"GPU {each.index}", "green"), (f"  {each.vendor} {address}", "dim"))
            )
        else:
            tree.add(_nic(each, out.get(each.name)))


def _nic(nic: Nic, left_out: str | None) -> Text:
    facts = [nic.driver, nic.location.pci_address, nic.netdev]
    text = Text.assemble((nic.name, "cyan"), "  ", (" ".join(filter(None, facts)), "dim"))
    for port in nic.ports:
        speed = _speed(port.bits_per_second) if port.active else ""
        layer = "" if port.link_layer.lower() == "unknown" else port.link_layer  # EFA
        name = f"port {port.number}" if len(nic.ports) > 1 else ""
        text.append("  " + " ".join(filter(None, (name, speed, layer))), "dim")
        if not port.active:
            text.append(f" {port.state}", "yellow")
    if left_out is not None:
        text.append(f"  in no group: {left_out}", "yellow")
    return text


def _speed(bits_per_second: int) -> str:
    return f"{bits_per_second / 1e9:g} Gbit/s"
