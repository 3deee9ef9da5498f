"""All checks, in the order they are shown."""

from __future__ import annotations

from kvxfer.doctor import (
    devices,
    engine,
    fabrics,
    limits,
    nic_fabrics,
    python_packages,
    settings,
)
from kvxfer.doctor.finding import Finding, Status
from kvxfer.doctor.host import Host


def examine(host: Host) -> list[Finding]:
    """Every finding about this process and `host`."""
    return [
        engine.native_module(),
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
    ]


def core_works(findings: list[Finding]) -> bool:
    """False where pages cannot be moved at all."""
    return not any(finding.status is Status.BROKEN for finding in findings)
