"""Limits of the system that the engine's speed or reach depends on."""

from __future__ import annotations

import os
import re
import resource

from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host

# A worker holds some ten descriptors, and a few more for each connected peer.
_ENOUGH_FILES = 4096
# A lane fills at most this much of a socket's buffer; less slows down links with a long delay.
_ENOUGH_SOCKET_BUFFER = 4 << 20
_CAP_IPC_LOCK = 14
_THP = "sys/kernel/mm/transparent_hugepage"


def open_files(limits: tuple[int, int] | None = None) -> Finding:
    """Checks the limit of open files. `limits` are the soft and the hard limit."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{_amount(soft)} (hard limit {_amount(hard)})"
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        return Finding(
            Area.LIMITS,
            "open files",
            Status.LIMITED,
            f"{detail}: bounds how many peers can be connected",
            f"ulimit -n {_ENOUGH_FILES}, or LimitNOFILE= of the service",
        )
    return Finding(Area.LIMITS, "open files", Status.OK, detail)


def locked_memory(limits: tuple[int, int] | None = None) -> Finding:
    """Reports the limit of locked memory. `limits` are the soft and the hard limit in bytes."""
    soft, _ = limits or resource.getrlimit(resource.RLIMIT_MEMLOCK)
    amount = _amount(soft) if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return Finding(
        Area.LIMITS,
        "locked memory",
        Status.INFO,
        f"{amount}; tcp and local pin no memory, verbs and ofi all that is registered",
    )


def lockable_memory(host: Host, limits: tuple[int, int] | None = None) -> int | None:
    """Returns how many bytes this process may lock; None if nothing bounds it. `limits` are the
    soft and the hard limit."""
    soft, _ = limits or resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    status = host.text("proc/self/status") or ""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if capabilities is not None and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1:
        return None
    return soft


def huge_pages(host: Host) -> Finding:
    """Checks the transparent huge pages of registered memory."""
    return _thp(
        host,
        "huge pages",
        "enabled",
        ("always", "madvise"),
        "madvise",
        "registered memory lies on 4 KiB pages",
    )


def shared_huge_pages(host: Host) -> Finding:
    """Checks the transparent huge pages of memory from engine.alloc(), which asks for them itself
    if the kernel can collapse shared memory (MADV_COLLAPSE)."""
    name = "huge pages, shared memory"
    setting = host.text(f"{_THP}/shmem_enabled")
    if setting is not None and "[deny]" not in setting and _kernel(host) >= (6, 1):
        return Finding(Area.LIMITS, name, Status.OK, "engine.alloc() makes them itself")
    return _thp(
        host,
        name,
        "shmem_enabled",
        ("always", "within_size", "advise", "force"),
        "advise",
        "memory of engine.alloc() lies on 4 KiB pages",
    )


def _kernel(host: Host) -> tuple[int, ...]:
    release = host.text("proc/sys/kernel/osrelease") or ""
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])


def _thp(
    host: Host, name: str, file: str, good: tuple[str, ...], wanted: str, consequence: str
) -> Finding:
    text = host.text(f"{_THP}/{file}")
    if text is None:
        return Finding(
            Area.LIMITS,
            name,
            Status.LIMITED,
            f"the kernel has no transparent huge pages: {consequence}, local is slower",
        )
    # The kernel marks the choice: "always [madvise] never".
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in good:
        return Finding(Area.LIMITS, name, Status.OK, chosen)
    return Finding(
        Area.LIMITS,
        name,
        Status.LIMITED,
        f"{chosen or text}: {consequence}, local is slower",
        f"echo {wanted} > /{_THP}/{file}",
    )


def socket_buffers(host: Host) -> list[Finding]:
    """Checks the largest buffers that TCP may grow to by itself."""
    findings = []
    for name, file in (("TCP receive buffer", "tcp_rmem"), ("TCP send buffer", "tcp_wmem")):
        fields = (host.text(f"proc/sys/net/ipv4/{file}") or "").split()
        if len(fields) != 3:
            findings.append(Finding(Area.LIMITS, name, Status.INFO, f"{file} cannot be read"))
            continue
        largest = int(fields[2])
        small = largest < _ENOUGH_SOCKET_BUFFER
        findings.append(
            Finding(
                Area.LIMITS,
                name,
                Status.LIMITED if small else Status.OK,
                f"up to {largest / (1 << 20):g} MiB",
                f'sysctl net.ipv4.{file}="{fields[0]} {fields[1]} {_ENOUGH_SOCKET_BUFFER}"'
                if small
                else None,
            )
        )
    return findings


def shared_memory(host: Host) -> Finding:
    """Reports the size of /dev/shm, which other software on the host may need."""
    name = "shared memory file system"
    try:
        space = os.statvfs(host.root / "dev/shm")
    except OSError:
        return Finding(Area.LIMITS, name, Status.INFO, "not mounted; the engine does not need it")
    size, free = (
        blocks * space.f_frsize / (1 << 30) for blocks in (space.f_blocks, space.f_bavail)
    )
    return Finding(
        Area.LIMITS,
        name,
        Status.INFO,
        f"{size:.1f} GiB on /dev/shm, {free:.1f} GiB free; engine.alloc() does not draw on it",
    )


def memory(host: Host) -> Finding:
    """Reports the memory for pools: free memory, and the control group's bound."""
    fields = dict(
        line.split(":", 1) for line in (host.text("proc/meminfo") or "").splitlines() if ":" in line
    )
    facts = []
    for label, key in (("", "MemTotal"), (" available", "MemAvailable")):
        if key in fields:
            facts.append(f"{int(fields[key].split()[0]) / (1 << 20):.1f} GiB{label}")
    bound = host.text("sys/fs/cgroup/memory.max")
    if bound is not None and bound.isdecimal():
        facts.append(f"control group allows {int(bound) / (1 << 30):.1f} GiB")
    return Finding(Area.LIMITS, "memory", Status.INFO, ", ".join(facts) or "unknown")


def cores(count: int | None = None) -> Finding:
    """Checks the number of cores. `count` are the cores that this process may use."""
    available = len(os.sched_getaffinity(0)) if count is None else count
    if available < 2:
        return Finding(
            Area.LIMITS,
            "cores",
            Status.LIMITED,
            "1: the engine's thread and the worker's take turns",
            "give the worker at least 2 cores",
        )
    return Finding(Area.LIMITS, "cores", Status.OK, str(available))


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
