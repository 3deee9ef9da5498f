"""All checks, in the order they are shown."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvxfer.doctor import (
    clocks,
    devices,
    fabrics,
    limits,
    loopback,
    nic_details,
    nic_fabrics,
    pcie,
    python_packages,
    settings,
)
from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host
from kvxfer.doctor.loopback import Loopback
from kvxfer.doctor.nic_details import NicDetails
from kvxfer.doctor.nic_fabrics import Library
from kvxfer.doctor.pcie import Iommu
from kvxfer.topology import Sysfs, read_topology
from kvxfer.version import __version__


def examine(host: Host) -> list[Finding]:
    """Returns every finding about this process and `host`."""
    return [
        python_packages.native_module(),
        fabrics.tcp(),
        fabrics.local_shared(),
        fabrics.local_cma(host),
        fabrics.pidfd(),
        fabrics.namespaces(host),
        nic_fabrics.verbs(host),
        nic_fabrics.ofi(host),
        *devices.nics(host),
        *devices.rdma_nics(host),
        *devices.gpus(),
        limits.cores(),
        limits.memory(host),
        limits.huge_pages(host),
        limits.shared_huge_pages(host),
        *limits.socket_buffers(host),
        limits.open_files(),
        limits.locked_memory(),
        limits.shared_memory(host),
        python_packages.interpreter(),
        *python_packages.extras(),
        *settings.variables(host),
        *clocks.clock(host),
    ]


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware in a report of a problem with NICs. `gpus` is only a count."""

    nics: tuple[NicDetails, ...]
    iommu: Iommu
    libraries: tuple[Library, ...]
    gpus: int

    @classmethod
    def read(cls, host: Host) -> Hardware:
        return cls(
            nic_details.read_nics(host),
            pcie.read_iommu(host),
            nic_fabrics.libraries(host),
            len(read_topology(Sysfs.below(host.root)).gpus),
        )

    def findings(self) -> list[Finding]:
        rows = [row for nic in self.nics for row in nic_details.findings(nic)]
        on_pcie = [nic.pcie for nic in self.nics if nic.pcie is not None]
        if on_pcie:
            rows.append(pcie.acs(on_pcie, self.gpus))
        return [*rows, pcie.iommu(self.iommu), nic_fabrics.libraries_finding(self.libraries)]


def send_loopbacks(
    nics: Sequence[NicDetails],
    gpus: int = 0,
    send: Callable[[str, str | None, int | None], Loopback] = loopback.loopback,
) -> list[Loopback]:
    """Sends through each NIC alone, over the fabrics that need none, and by all of these from and
    to each of `gpus` GPUs, one after the other."""
    ways: list[tuple[str, str | None, int | None]] = []
    for gpu in (None, *range(gpus)):
        ways += [(nic.fabric, nic.name, gpu) for nic in nics]
        ways += [("tcp", None, gpu), ("local", None, gpu)]
    return [send(*way) for way in ways]


def loopback_findings(found: Sequence[Loopback]) -> list[Finding]:
    rows = [loopback.finding(each) for each in found]
    if all(each.nic is None for each in found):
        none = "no RDMA NIC on this host: only tcp and local are tried"
        rows.insert(0, Finding(Area.LOOPBACK, "RDMA", Status.ABSENT, none))
    return rows


def software() -> dict[str, str]:
    """Returns the versions that a report begins with."""
    return {
        "kvxfer": __version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def core_works(findings: list[Finding]) -> bool:
    """True if pages can be moved at all."""
    return not any(finding.status is Status.BROKEN for finding in findings)
