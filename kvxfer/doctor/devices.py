"""NICs and GPUs."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host
from kvxfer.topology import Sysfs, left_out, read_topology

_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version",
    "--format=csv,noheader",
)
_WAYS = "its memory goes over local, tcp and the NICs of verbs that reach it"


def nics(host: Host) -> list[Finding]:
    """Reports the network interfaces that tcp may go through; the loopback is left out."""
    found = []
    for interface in host.entries("sys/class/net"):
        if interface.name == "lo" or not interface.is_dir():
            continue
        place = f"sys/class/net/{interface.name}"
        facts = [host.text(f"{place}/operstate") or "state unknown"]
        # The speed of an interface that is down, or virtual, is -1 or cannot be read.
        speed = host.text(f"{place}/speed")
        if speed is not None and speed.isdecimal():
            facts.append(f"{int(speed) / 1000:g} Gbit/s")
        facts.append(f"MTU {host.text(f'{place}/mtu')}")
        driver = interface / "device" / "driver"
        if driver.is_symlink():
            facts.append(driver.readlink().name)
        found.append(Finding(Area.NICS, interface.name, Status.OK, ", ".join(facts)))
    return found or [
        Finding(
            Area.NICS,
            "network",
            Status.LIMITED,
            "no interface but the loopback: only peers on this host can be reached",
            "give this host or container a network interface",
        )
    ]


def rdma_nics(host: Host) -> list[Finding]:
    """Reports RDMA devices, the fabric of each, and why no rank uses it by default."""
    found = []
    topology = read_topology(Sysfs.below(host.root))
    out = left_out(topology)
    for nic in topology.nics:
        ports = [
            f"port {port.number}: {port.link_layer}, {port.state}, "
            f"{port.bits_per_second / 1e9:g} Gbit/s"
            for port in nic.ports
        ]
        facts = [*(ports or ["no ports"]), nic.driver, nic.netdev, f"for {nic.fabric}"]
        if nic.active and nic.name in out:
            facts.append(f"used only if nics names it: {out[nic.name]}")
        found.append(Finding(Area.NICS, nic.name, Status.INFO, "; ".join(filter(None, facts))))
    return found or [Finding(Area.NICS, "RDMA", Status.ABSENT, "no RDMA NIC")]


def gpus(
    query: Callable[[], list[str]] | None = None, count: Callable[[], int] | None = None
) -> list[Finding]:
    """Reports NVIDIA GPUs. `query` returns nvidia-smi's lines and raises OSError if there is none;
    `count` asks libcuda and raises OSError likewise."""
    try:
        lines = (query or _nvidia_smi)()
    except OSError:
        return [_counted(count or cuda_device_count)]
    found = []
    for index, line in enumerate(lines):
        name, memory, driver = (part.strip() for part in line.split(",", 2))
        found.append(
            Finding(
                Area.GPUS,
                f"GPU {index}",
                Status.INFO,
                f"{name}, {memory}, driver {driver}; {_WAYS}",
            )
        )
    return found or [_no_gpu("nvidia-smi lists none")]


def _counted(count: Callable[[], int]) -> Finding:
    try:
        devices = count()
    except OSError as error:
        return _no_gpu(f"neither nvidia-smi nor libcuda works ({error})")
    if devices == 0:
        return _no_gpu("libcuda finds none")
    return Finding(Area.GPUS, "GPUs", Status.INFO, f"{devices} found by libcuda; {_WAYS}")


def _no_gpu(reason: str) -> Finding:
    return Finding(Area.GPUS, "GPU", Status.ABSENT, f"none: {reason}")


def _nvidia_smi() -> list[str]:
    try:
        result = subprocess.run(  # noqa: S603
            _NVIDIA_SMI, capture_output=True, text=True, timeout=10, check=True
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"nvidia-smi: {error}") from error
    return [line for line in result.stdout.splitlines() if line.strip()]


def cuda_device_count() -> int:
    """Returns the number of GPUs that this process sees. Raises OSError if libcuda cannot say."""
    cuda = ctypes.CDLL("libcuda.so.1")
    devices = ctypes.c_int()
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(devices))
    if status != 0:
        raise OSError(f"libcuda answers error {status}")
    return devices.value
