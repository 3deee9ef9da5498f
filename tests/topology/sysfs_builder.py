"""Writes trees like /sys."""

from __future__ import annotations

from pathlib import Path

from kvxfer.topology import Sysfs, Topology, read_topology


class SysfsBuilder:
    """A builder of a sysfs that is laid out as the kernel's, with relative symlinks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, files: dict[str, str]) -> None:
        for path, text in files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        """Makes a link; `target` is relative to the folder that holds it, and need not exist."""
        link = self.folder / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def pci_device(self, path: str, **files: str) -> str:
        self.write({f"devices/{path}/{name}": text for name, text in files.items()})
        self.link(f"bus/pci/devices/{path.rpartition('/')[2]}", f"../../../devices/{path}")
        return f"devices/{path}"

    def nic(self, device: str, name: str, **port: str) -> str:
        """Writes an RDMA device with one port, below a folder of devices/."""
        nic = f"{device}/infiniband/{name}"
        self.write({f"{nic}/ports/1/{fact}": text for fact, text in port.items()})
        self.link(f"{nic}/device", "../..")
        self.link(f"class/infiniband/{name}", f"../../{nic}")
        return nic

    def routes(self, defaults: dict[str, int]) -> None:
        """Writes /proc/net/route beside it: default routes by their metric, and another route."""
        head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
        rows = [head, "lan0 0000000A 00000000 0001 0 0 0 000000FF 0 0 0"]
        for name, metric in defaults.items():
            rows.append(f"{name} 00000000 0100000A 0003 0 0 {metric} 00000000 0 0 0")
        self.write({"../proc/net/route": "\n".join(row.replace(" ", "\t") for row in rows)})

    def read(self) -> Topology:
        return read_topology(Sysfs(self.folder))
