"""Machines whose /sys the tests read: a table for each, which is written as a tree.

A tree holds as much of a machine's /sys as kvxfer reads: NUMA nodes, GPUs, RDMA NICs, and their
places on PCIe. The tables are modelled after the public documentation of the machines. They were
not recorded on such machines: bus numbers, bridges and CPU numbers are plausible, not authentic.

`python -m tests.topology.machines DIR` writes all; `kvxfer doctor --sysfs DIR/dgx` draws one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.topology.sysfs_builder import SysfsBuilder


@dataclass(frozen=True)
class _Kind:
    """The properties that all PCI devices of a kind share."""

    pci_class: str
    vendor: str
    driver: str | None = None
    port: dict[str, str] = field(default_factory=dict)
    """The files of an RDMA NIC's port."""


_KINDS: Final = {
    "gpu": _Kind("0x030200", "0x10de"),
    "efa": _Kind(
        "0x020000",
        "0x1d0f",
        "efa",
        {"state": "4: ACTIVE", "rate": "200 Gb/sec (4X HDR)", "link_layer": "Unknown"},
    ),
    "mlx5_core": _Kind(
        "0x020700",
        "0x15b3",
        "mlx5_core",
        {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"},
    ),
    "roce": _Kind(
        "0x020000",
        "0x15b3",
        "mlx5_core",
        {"state": "4: ACTIVE", "rate": "200 Gb/sec (4X HDR)", "link_layer": "Ethernet"},
    ),
    "lom": _Kind(
        "0x020000",
        "0x15b3",
        "mlx5_core",
        {"state": "4: ACTIVE", "rate": "25 Gb/sec (1X EDR)", "link_layer": "Ethernet"},
    ),
    "i915": _Kind("0x030000", "0x8086", "i915"),
    "iwlwifi": _Kind("0x028000", "0x8086", "iwlwifi"),
}


@dataclass(frozen=True)
class _Machine:
    cpus: tuple[str, ...]
    """The CPUs of each NUMA node."""
    devices: str
    """A line for each PCI device: its NUMA node, its path, its kind, and the names of its RDMA NIC
    and its network interface, if any."""
    default_routes: dict[str, int] = field(default_factory=dict)
    """The metric of each default route, by interface."""


MACHINES: Final = {
    # AWS p5en.48xlarge: 8 H200, 16 EFA of 200 Gbit/s, two of them and one GPU below each PCIe
    # switch.
    "p5en": _Machine(
        ("0-47,96-143", "48-95,144-191"),
        """
 0  pci0000:44/0000:44:01.0/0000:45:00.0/0000:46:00.0/0000:55:00.0  efa        rdmap85s0
 0  pci0000:44/0000:44:01.0/0000:45:00.0/0000:46:01.0/0000:56:00.0  efa        rdmap86s0
 0  pci0000:44/0000:44:01.0/0000:45:00.0/0000:46:02.0/0000:59:00.0  gpu
 0  pci0000:44/0000:44:02.0/0000:4b:00.0/0000:4c:00.0/0000:57:00.0  efa        rdmap87s0
 0  pci0000:44/0000:44:02.0/0000:4b:00.0/0000:4c:01.0/0000:58:00.0  efa        rdmap88s0
 0  pci0000:44/0000:44:02.0/0000:4b:00.0/0000:4c:02.0/0000:5a:00.0  gpu
 0  pci0000:5d/0000:5d:01.0/0000:5e:00.0/0000:5f:00.0/0000:6e:00.0  efa        rdmap110s0
 0  pci0000:5d/0000:5d:01.0/0000:5e:00.0/0000:5f:01.0/0000:6f:00.0  efa        rdmap111s0
 0  pci0000:5d/0000:5d:01.0/0000:5e:00.0/0000:5f:02.0/0000:72:00.0  gpu
 0  pci0000:5d/0000:5d:02.0/0000:64:00.0/0000:65:00.0/0000:70:00.0  efa        rdmap112s0
 0  pci0000:5d/0000:5d:02.0/0000:64:00.0/0000:65:01.0/0000:71:00.0  efa        rdmap113s0
 0  pci0000:5d/0000:5d:02.0/0000:64:00.0/0000:65:02.0/0000:73:00.0  gpu
 1  pci0000:76/0000:76:01.0/0000:77:00.0/0000:78:00.0/0000:87:00.0  efa        rdmap135s0
 1  pci0000:76/0000:76:01.0/0000:77:00.0/0000:78:01.0/0000:88:00.0  efa        rdmap136s0
 1  pci0000:76/0000:76:01.0/0000:77:00.0/0000:78:02.0/0000:8b:00.0  gpu
 1  pci0000:76/0000:76:02.0/0000:7d:00.0/0000:7e:00.0/0000:89:00.0  efa        rdmap137s0
 1  pci0000:76/0000:76:02.0/0000:7d:00.0/0000:7e:01.0/0000:8a:00.0  efa        rdmap138s0
 1  pci0000:76/0000:76:02.0/0000:7d:00.0/0000:7e:02.0/0000:8c:00.0  gpu
 1  pci0000:8f/0000:8f:01.0/0000:90:00.0/0000:91:00.0/0000:a0:00.0  efa        rdmap160s0
 1  pci0000:8f/0000:8f:01.0/0000:90:00.0/0000:91:01.0/0000:a1:00.0  efa        rdmap161s0
 1  pci0000:8f/0000:8f:01.0/0000:90:00.0/0000:91:02.0/0000:a4:00.0  gpu
 1  pci0000:8f/0000:8f:02.0/0000:96:00.0/0000:97:00.0/0000:a2:00.0  efa        rdmap162s0
 1  pci0000:8f/0000:8f:02.0/0000:96:00.0/0000:97:01.0/0000:a3:00.0  efa        rdmap163s0
 1  pci0000:8f/0000:8f:02.0/0000:96:00.0/0000:97:02.0/0000:a5:00.0  gpu
""",
    ),
    # NVIDIA DGX H100: 8 H100, 8 ConnectX-7 of 400 Gbit/s, one of them and one GPU below each PCIe
    # switch. Its storage and management NICs are left out.
    "dgx": _Machine(
        ("0-55,112-167", "56-111,168-223"),
        """
 0  pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0  mlx5_core  mlx5_0      ibp24s0
 0  pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0  gpu
 0  pci0000:3d/0000:3d:01.0/0000:3e:00.0/0000:3f:00.0/0000:40:00.0  mlx5_core  mlx5_1      ibp64s0
 0  pci0000:3d/0000:3d:01.0/0000:3e:00.0/0000:3f:02.0/0000:43:00.0  gpu
 0  pci0000:4c/0000:4c:01.0/0000:4d:00.0/0000:4e:00.0/0000:4f:00.0  mlx5_core  mlx5_2      ibp79s0
 0  pci0000:4c/0000:4c:01.0/0000:4d:00.0/0000:4e:02.0/0000:52:00.0  gpu
 0  pci0000:5b/0000:5b:01.0/0000:5c:00.0/0000:5d:00.0/0000:5e:00.0  mlx5_core  mlx5_3      ibp94s0
 0  pci0000:5b/0000:5b:01.0/0000:5c:00.0/0000:5d:02.0/0000:61:00.0  gpu
 1  pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0/0000:9a:00.0  mlx5_core  mlx5_4      ibp154s0
 1  pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:02.0/0000:9d:00.0  gpu
 1  pci0000:bd/0000:bd:01.0/0000:be:00.0/0000:bf:00.0/0000:c0:00.0  mlx5_core  mlx5_5      ibp192s0
 1  pci0000:bd/0000:bd:01.0/0000:be:00.0/0000:bf:02.0/0000:c3:00.0  gpu
 1  pci0000:cb/0000:cb:01.0/0000:cc:00.0/0000:cd:00.0/0000:ce:00.0  mlx5_core  mlx5_6      ibp206s0
 1  pci0000:cb/0000:cb:01.0/0000:cc:00.0/0000:cd:02.0/0000:d1:00.0  gpu
 1  pci0000:d9/0000:d9:01.0/0000:da:00.0/0000:db:00.0/0000:dc:00.0  mlx5_core  mlx5_7      ibp220s0
 1  pci0000:d9/0000:d9:01.0/0000:da:00.0/0000:db:02.0/0000:df:00.0  gpu
""",
    ),
    # A server: an H100 and a RoCE NIC of 200 Gbit/s on each socket; one more such NIC with the
    # host's default route, and a port of 25 Gbit/s on the board.
    "server": _Machine(
        ("0-31", "32-63"),
        """
 0  pci0000:15/0000:15:01.0/0000:16:00.0  gpu
 0  pci0000:15/0000:15:02.0/0000:17:00.0  roce       mlx5_0      ens1np0
 0  pci0000:30/0000:30:01.0/0000:31:00.0  roce       mlx5_1      ens2np0
 0  pci0000:00/0000:00:1c.0/0000:01:00.0  lom        mlx5_2      eno1np0
 1  pci0000:97/0000:97:01.0/0000:98:00.0  gpu
 1  pci0000:97/0000:97:02.0/0000:99:00.0  roce       mlx5_3      ens3np0
""",
        {"eno1np0": 200, "ens2np0": 100},
    ),
    # A laptop with an integrated Intel GPU and a wifi card: no NVIDIA or AMD GPU, no RDMA NIC.
    "laptop": _Machine(
        ("0-15",),
        """
-1  pci0000:00/0000:00:02.0  i915
-1  pci0000:00/0000:00:14.3  iwlwifi    -           wlp0s20f3
""",
    ),
}


def write(name: str, folder: Path) -> Path:
    """Writes a machine's tree below `folder`; returns the folder that stands for its /."""
    machine = MACHINES[name]
    sysfs = SysfsBuilder(folder / name / "sys")
    for node, cpus in enumerate(machine.cpus):
        sysfs.write({f"devices/system/node/node{node}/cpulist": cpus})
    sysfs.routes(machine.default_routes)
    for line in machine.devices.strip().splitlines():
        _write_device(sysfs, machine, *line.split())
    return folder / name


def _write_device(
    sysfs: SysfsBuilder,
    machine: _Machine,
    numa_node: str,
    path: str,
    kind_name: str,
    rdma_nic: str = "-",
    interface: str = "-",
) -> None:
    kind = _KINDS[kind_name]
    device = sysfs.pci_device(
        path,
        vendor=kind.vendor,
        numa_node=numa_node,
        local_cpulist=machine.cpus[max(int(numa_node), 0)],
        **{"class": kind.pci_class},
    )
    up = "../" * len(device.split("/"))
    if kind.driver is not None:
        sysfs.link(f"{device}/driver", f"{up}bus/pci/drivers/{kind.driver}")  # a dangling link
    if rdma_nic != "-":
        sysfs.nic(device, rdma_nic, **kind.port)
    if interface != "-":
        sysfs.write({f"{device}/net/{interface}/operstate": "up"})
        if not kind.port:
            sysfs.link(f"class/net/{interface}", f"../../{device}/net/{interface}")


if __name__ == "__main__":
    for each in MACHINES:
        write(each, Path(sys.argv[1]))
