"""The groups of NICs that serve a GPU or a NUMA node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvxfer.topology.devices import Gpu, Nic, Topology
from kvxfer.topology.distance import Distance, pcie_distance

# A NIC below this part of the fastest NIC's rate is left out: NICs of one network are nearly equal.
_SLOW: Final = 1 / 4


@dataclass(frozen=True, slots=True)
class DomainGroup:
    """The NICs that serve `gpu`, or a NUMA node if that is None; the nearest NIC comes first.

    `cpus` are those beside the NICs, for the engine's worker thread, including CPUs that this
    process may not use. `numa_node` is that of the NICs, None if the host does not say. Without a
    NIC, both are the GPU's. `bits_per_second` is the sum of the links, including links that another
    group shares.
    """

    gpu: Gpu | None
    nics: tuple[Nic, ...]
    numa_node: int | None
    cpus: tuple[int, ...]
    bits_per_second: int

    @property
    def distances(self) -> tuple[Distance, ...]:
        """The distance from the GPU to each NIC; empty without a GPU."""
        if self.gpu is None:
            return ()
        return tuple(pcie_distance(self.gpu.location, nic.location) for nic in self.nics)


def domain_groups(topology: Topology) -> tuple[DomainGroup, ...]:
    """Makes one group per GPU; without GPUs, one per NUMA node that has NICs. There is always one.

    NICs that `left_out` names are in none. Every GPU gets the same number of NICs, the nearest; if
    there are fewer NICs than GPUs, each GPU gets the nearest one and NICs are shared. A remaining
    NIC joins a group only if it is as near as that group's own: a NIC further away has another
    purpose, such as storage.
    """
    gpus = topology.gpus
    if not gpus:
        return host_groups(topology)
    nics = serving_nics(topology)
    hands = _shared(gpus, nics) if len(nics) < len(gpus) else _dealt(gpus, nics)
    return tuple(_group(topology, gpu, hand) for gpu, hand in zip(gpus, hands, strict=True))


def host_groups(topology: Topology) -> tuple[DomainGroup, ...]:
    """Makes one group per NUMA node that has NICs, whatever the GPUs: for host memory. If there are
    no NICs, there is one group without NICs."""
    nics = serving_nics(topology)
    if not nics:
        return (_group(topology, None, ()),)
    nodes = {nic.location.numa_node for nic in nics}
    return tuple(
        _group(topology, None, [nic for nic in nics if nic.location.numa_node == node])
        for node in sorted(nodes, key=lambda node: (node is None, node))
    )


def serving_nics(topology: Topology) -> tuple[Nic, ...]:
    """Returns the NICs that groups are made of."""
    out = left_out(topology)
    return tuple(nic for nic in topology.nics if nic.name not in out)


def left_out(topology: Topology) -> dict[str, str]:
    """Returns the NICs that are in no group whatever the GPUs, by name, each with the reason: it
    has no active port; it is much slower than the fastest, as NICs for management are; it carries
    the host's default route, and others that do not are as fast."""
    out = {nic.name: "no active port" for nic in topology.nics if not nic.active}
    active = [nic for nic in topology.nics if nic.active]
    fastest = max((nic.bits_per_second for nic in active), default=0)
    fast = []
    for nic in active:
        if 0 < nic.bits_per_second < fastest * _SLOW:  # 0 is unknown
            out[nic.name] = (
                f"its {nic.bits_per_second / 1e9:g} Gbit/s are less than a quarter of the fastest "
                f"NIC's {fastest / 1e9:g}"
            )
        else:
            fast.append(nic)
    for nic in fast:
        others = (each.bits_per_second for each in fast if each.netdev != nic.netdev)
        if (
            nic.netdev is not None
            and nic.netdev == topology.default_route
            and max(others, default=-1) >= nic.bits_per_second
        ):
            out[nic.name] = f"{nic.netdev} has the host's default route"
    return out


def spare_nics(topology: Topology, groups: Sequence[DomainGroup]) -> tuple[Nic, ...]:
    """Returns active NICs that are in none of `groups`."""
    used = {nic.name for group in groups for nic in group.nics}
    return tuple(nic for nic in topology.nics if nic.active and nic.name not in used)


def _dealt(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> list[list[Nic]]:
    """Gives every NIC to one GPU. PCIe is a tree, so the nearest pairs first is best for all."""
    share = len(nics) // len(gpus)
    hands: list[list[Nic]] = [[] for _ in gpus]
    farthest = [Distance.PIX for _ in gpus]
    free = set(range(len(nics)))
    pairs = _pairs(gpus, nics)
    for distance, gpu, nic in pairs:
        if nic in free and len(hands[gpu]) < share:
            hands[gpu].append(nics[nic])
            farthest[gpu] = distance
            free.remove(nic)
    for distance, gpu, nic in pairs:
        if nic in free and len(hands[gpu]) == share and distance <= farthest[gpu]:
            hands[gpu].append(nics[nic])
            free.remove(nic)
    return hands


def _shared(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> list[list[Nic]]:
    """Gives every GPU its nearest NIC; of several, the one with the fewest GPUs. GPUs that have a
    NIC nearby choose first."""
    hands: list[list[Nic]] = [[] for _ in gpus]
    users = [0 for _ in nics]
    nearest: dict[int, Distance] = {}
    for distance, gpu, _ in _pairs(gpus, nics):
        nearest.setdefault(gpu, distance)
    for gpu, distance in nearest.items():
        candidates = [
            index
            for index, nic in enumerate(nics)
            if pcie_distance(gpus[gpu].location, nic.location) is distance
        ]
        chosen = min(candidates, key=users.__getitem__)
        users[chosen] += 1
        hands[gpu].append(nics[chosen])
    return hands


def _pairs(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> list[tuple[Distance, int, int]]:
    """Pairs every GPU with every NIC, by index, the nearest first."""
    return sorted(
        (pcie_distance(gpu.location, nic.location), gpu_index, nic_index)
        for gpu_index, gpu in enumerate(gpus)
        for nic_index, nic in enumerate(nics)
    )


def _group(topology: Topology, gpu: Gpu | None, nics: Sequence[Nic]) -> DomainGroup:
    if nics:
        place = nics[0].location
        numa_node, cpus = place.numa_node, place.cpus or topology.cpus
    elif gpu is not None:
        numa_node, cpus = gpu.location.numa_node, gpu.location.cpus or topology.cpus
    else:
        nodes = topology.numa_nodes
        numa_node, cpus = nodes[0].number if len(nodes) == 1 else None, topology.cpus
    speed = sum(nic.bits_per_second for nic in nics)
    return DomainGroup(gpu, tuple(nics), numa_node, cpus, speed)
