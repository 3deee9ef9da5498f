"""The group that an engine of this process opens."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from kvxfer.errors import InvalidArgument
from kvxfer.topology.discovery import read_topology
from kvxfer.topology.groups import DomainGroup, domain_groups, host_groups
from kvxfer.topology.sysfs import Sysfs


def local_group(
    gpu: int | None = None,
    root: Path = Path("/"),
    *,
    running_on: Collection[int] | None = None,
) -> DomainGroup:
    """The NICs and CPUs for `gpu`, counted as in `Gpu.index`: what CUDA_VISIBLE_DEVICES hides
    counts, too. None means host memory: the group of the NUMA node that this process runs on.

    `running_on` are the CPUs that this process may use, taken from its affinity if None. Raises
    InvalidArgument where there is no such GPU.
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
