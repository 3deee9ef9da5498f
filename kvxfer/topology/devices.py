"""The parts of a host that a domain group is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a device. `pci_path` runs from the host bridge ("pci0000:15") over every PCI
    bridge to the device itself ("0000:18:00.0"); it is empty if the device is not on PCI.
    `numa_node` is None if the host does not say. `cpus` are those beside the device."""

    pci_path: tuple[str, ...] = ()
    numa_node: int | None = None
    cpus: tuple[int, ...] = ()

    @property
    def pci_address(self) -> str | None:
        return self.pci_path[-1] if self.pci_path else None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node. `cpus` is empty if the node has only memory."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `index` counts NVIDIA GPUs in the order of their PCI addresses, as nvidia-smi does,
    then AMD GPUs."""

    index: int
    vendor: str
    location: Location


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA NIC. `bits_per_second` is 0 if the rate cannot be read."""

    number: int
    link_layer: str
    state: str
    bits_per_second: int

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device. Soft RoCE has no PCI driver and no PCI address."""

    name: str
    driver: str | None
    netdev: str | None
    ports: tuple[Port, ...]
    location: Location

    @property
    def active(self) -> bool:
        """Whether anything can be sent through it."""
        return any(port.active for port in self.ports)

    @property
    def bits_per_second(self) -> int:
        """The rate of its active ports together."""
        return sum(port.bits_per_second for port in self.ports if port.active)

    @property
    def fabric(self) -> str:
        """The fabric that drives it: "ofi" for EFA, which has no reliable connections of verbs."""
        if self.driver is None:
            return "ofi" if self.name.startswith(("efa_", "rdmap")) else "verbs"
        return "ofi" if self.driver == "efa" else "verbs"


@dataclass(frozen=True, slots=True)
class Topology:
    numa_nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    default_route: str | None = None
    """The network interface of the host's preferred IPv4 default route."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted({cpu for node in self.numa_nodes for cpu in node.cpus}))
