"""The NICs that an engine of this process opens."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidArgument
from kvxfer.topology.devices import Nic, Topology
from kvxfer.topology.discovery import read_topology
from kvxfer.topology.distance import pcie_distance
from kvxfer.topology.groups import (
    DomainGroup,
    domain_groups,
    host_groups,
    left_out,
    serving_nics,
)
from kvxfer.topology.sysfs import Sysfs

_VERBS: Final = "class/infiniband_verbs"


def local_group(
    gpu: int | None = None,
    root: Path = Path("/"),
    *,
    running_on: Collection[int] | None = None,
) -> DomainGroup:
    """Returns the NICs and CPUs for `gpu`, an index as in `Gpu.index`: GPUs that
    CUDA_VISIBLE_DEVICES hides count, too. None means host memory: the group of the NUMA node that
    this process runs on.

    `running_on` are the CPUs that this process may use, taken from its affinity if None. Raises
    InvalidArgument if there is no such GPU.
    """
    topology = read_topology(Sysfs.below(root))
    if gpu is None:
        cpus = set(os.sched_getaffinity(0) if running_on is None else running_on)
        return max(host_groups(topology), key=lambda group: len(cpus.intersection(group.cpus)))
    count = len(topology.gpus)
    if not 0 <= gpu < count:
        there = {0: "none", 1: "GPU 0 alone"}.get(count, f"GPUs 0 to {count - 1}")
        raise InvalidArgument(
            f"there is no GPU {gpu}: {root / 'sys/bus/pci/devices'} shows {there}; `kvxfer doctor` "
            "draws the topology, and gpu=None serves host memory"
        )
    return domain_groups(topology)[gpu]


@dataclass(frozen=True, slots=True)
class NicChoice:
    """The NICs for the memory of one rank.

    `names` is None if there is nothing to choose from, and empty if `exclude` leaves none.
    `left_out` has the reason for each other NIC of the host. `near` names what they are near to.
    """

    names: tuple[str, ...] | None
    left_out: Mapping[str, str]
    near: str

    def __str__(self) -> str:
        if self.names is None:
            chosen = "no NIC is chosen: /sys shows none that can be used"
        else:
            chosen = f"NICs for {self.near}: {', '.join(self.names) or 'none'}"
        names_of: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            names_of.setdefault(reason, []).append(name)
        others = (f"{', '.join(names)} ({reason})" for reason, names in names_of.items())
        return "; not ".join((chosen, *others))


def choose_nics(
    topology: Topology,
    gpu: str | None,
    *,
    running_on: Collection[int],
    allow: Sequence[str] = (),
    exclude: Sequence[str] = (),
    fabrics: Collection[str] = ("verbs", "ofi"),
    closed: Collection[str] = (),
) -> NicChoice:
    """Chooses the NICs nearest to a GPU, or, for host memory, on the NUMA nodes of `running_on`.

    gpu: its PCI address as in sysfs; None for host memory, or if it is unknown.
    running_on: the CPUs that the process may use.
    allow: the names to take instead, whatever they are near to. A name that no NIC has is kept.
    exclude: names never to take. In both lists a trailing * stands for any rest.
    fabrics: those whose NICs are taken.
    closed: names of NICs that the process cannot open. If it can open others, it was given
        those: all of them that are as near as the nearest are taken.

    Raises InvalidArgument if `allow` and `exclude` leave none of the host's NICs.
    """
    out: dict[str, str] = {}
    kept = []
    for nic in topology.nics:
        if _named(nic.name, exclude):
            out[nic.name] = "exclude_nics names it"
        elif nic.fabric not in fabrics:
            out[nic.name] = f"fabric {nic.fabric} is not used"
        else:
            kept.append(nic)
    if allow:
        return _allowed(topology, kept, allow, exclude, out)
    within = replace(topology, nics=tuple(nic for nic in kept if nic.name not in closed))
    serving = serving_nics(within)
    if not serving:  # the engine says what is wrong with each
        excluded = any(_named(n.name, exclude) and n.fabric in fabrics for n in topology.nics)
        names = tuple(nic.name for nic in kept) if excluded else None
        return NicChoice(names, out, "all memory")
    out |= {nic.name: "this process cannot open it" for nic in kept if nic.name in closed}
    out |= left_out(within)
    chosen, near = _nearest(within, serving, gpu, running_on, given=len(within.nics) < len(kept))
    out |= {nic.name: f"not nearest to {near}" for nic in serving if nic not in chosen}
    return NicChoice(tuple(nic.name for nic in chosen), out, near)


def closed_nics(root: Path = Path("/")) -> frozenset[str]:
    """Returns the names of RDMA NICs whose file in /dev/infiniband this process may not read and
    write: a container is given only some of these files."""
    sysfs = Sysfs.below(root)
    return frozenset(
        name
        for verbs in sysfs.names(_VERBS)
        if (name := sysfs.text(f"{_VERBS}/{verbs}/ibdev"))
        and not os.access(root / "dev/infiniband" / verbs, os.R_OK | os.W_OK)
    )


def _nearest(
    topology: Topology,
    serving: Sequence[Nic],
    gpu: str | None,
    running_on: Collection[int],
    *,
    given: bool,
) -> tuple[Sequence[Nic], str]:
    if gpu is None:
        groups = host_groups(topology)
        # A process that may run on several nodes has memory on all of them.
        near = [group for group in groups if not group.cpus or {*group.cpus} & {*running_on}]
        nodes = sorted({str(group.numa_node) for group in near if group.numa_node is not None})
        words = f"NUMA node {', '.join(nodes)}" if nodes else "host memory"
        return [nic for group in near or groups for nic in group.nics], words
    index = next((g.index for g in topology.gpus if g.location.pci_address == gpu), None)
    if index is None:
        return serving, f"GPU {gpu}, which /sys does not show"
    words = f"GPU {index} ({gpu})"
    if not given:
        return domain_groups(topology)[index].nics, words
    place = topology.gpus[index].location
    distances = {nic.name: pcie_distance(place, nic.location) for nic in serving}
    return [nic for nic in serving if distances[nic.name] == min(distances.values())], words


def _allowed(
    topology: Topology,
    kept: Sequence[Nic],
    allow: Sequence[str],
    exclude: Sequence[str],
    out: dict[str, str],
) -> NicChoice:
    found = [
        name
        for pattern in allow
        for name in (
            [nic.name for nic in kept if _named(nic.name, [pattern])]
            if pattern.endswith("*")
            else [pattern]
        )
        if not _named(name, exclude)
    ]
    if not found and topology.nics:
        here = ", ".join(nic.name for nic in topology.nics)
        raise InvalidArgument(
            f"nics {list(allow)} without exclude_nics {list(exclude)} is none of the NICs of this "
            f"host that its fabrics could use; it has {here}"
        )
    names = tuple(dict.fromkeys(found))
    out |= {nic.name: "nics does not name it" for nic in kept if nic.name not in names}
    out = {name: reason for name, reason in out.items() if name not in names}
    return NicChoice(names or None, out, "all memory, as nics says")


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )
