"""The fabrics whose NIC places the bytes: verbs and ofi."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host
from kvxfer.doctor.limits import lockable_memory
from kvxfer.topology import Nic, Sysfs, read_topology


@dataclass(frozen=True, slots=True)
class _Fabric:
    name: str
    devices: str
    soname: str
    install: str  # the library and its drivers
    headers: str


_VERBS = _Fabric(
    "verbs",
    "InfiniBand and RoCE NICs",
    "libibverbs.so.1",
    "apt-get install libibverbs1 ibverbs-providers",
    "libibverbs-dev",
)
_OFI = _Fabric(
    "ofi",
    "EFA devices",
    "libfabric.so.1",
    "install the EFA software of AWS (aws-efa-installer), which brings libfabric below "
    "/opt/amazon/efa",
    "libfabric-dev",
)


def verbs(
    host: Host,
    built: Sequence[str] | None = None,
    locked: tuple[int, int] | None = None,
    may_open: Callable[[Path], bool] | None = None,
) -> Finding:
    """Checks InfiniBand and RoCE. `built` are the fabrics of the native module, `locked` the soft
    and the hard limit of locked memory; `may_open` says whether a device file may be read and
    written."""
    return _examine(_VERBS, host, built, locked, may_open)


def ofi(
    host: Host,
    built: Sequence[str] | None = None,
    locked: tuple[int, int] | None = None,
    may_open: Callable[[Path], bool] | None = None,
) -> Finding:
    """Checks EFA by way of libfabric; the parameters are those of `verbs`."""
    return _examine(_OFI, host, built, locked, may_open)


def built_fabrics(name: str = "kvxfer._native") -> tuple[str, ...]:
    """Returns the fabrics that the native module was built with; none if it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return ()
    return tuple(getattr(module, "BUILT_FABRICS", ("local", "tcp")))


@dataclass(frozen=True, slots=True)
class Library:
    """An installed library. `version` is None if unknown."""

    soname: str
    path: str
    version: str | None


def libraries(
    host: Host, libfabric_version: Callable[[Path], str | None] | None = None
) -> tuple[Library, ...]:
    """Finds the libraries of the fabrics. `libfabric_version` asks a libfabric for its version."""
    found = []
    if (path := host.library(_VERBS.soname)) is not None:
        # rdma-core puts its version into file names: libibverbs.so.1.14.50.0 is of version 50.0.
        numbers = path.resolve().name.partition(".so.")[2].split(".")
        version = f"rdma-core {'.'.join(numbers[2:])}" if len(numbers) > 2 else None
        found.append(Library(_VERBS.soname, str(path), version))
    named = host.environment.get("KVXFER_LIBFABRIC")
    if (path := Path(named) if named else host.library(_OFI.soname)) is not None:
        version = (libfabric_version or _libfabric_version)(path)
        found.append(Library(_OFI.soname, str(path), version))
    return tuple(found)


def libraries_finding(found: Sequence[Library]) -> Finding:
    facts = [f"{each.soname} {each.version or '(version not readable)'}" for each in found]
    text = ", ".join(facts) or f"neither {_VERBS.soname} nor {_OFI.soname}"
    return Finding(Area.HARDWARE, "libraries", Status.INFO, text)


def _libfabric_version(path: Path) -> str | None:
    # The engine does the same: Omni-Path's library would take over the signals of a crash.
    os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
    os.environ.setdefault("HFI_NO_BACKTRACE", "1")
    try:
        both = int(ctypes.CDLL(str(path)).fi_version())
    except (OSError, AttributeError):
        return None
    return f"{both >> 16}.{both & 0xFFFF}"


def _examine(
    fabric: _Fabric,
    host: Host,
    built: Sequence[str] | None,
    locked: tuple[int, int] | None,
    may_open: Callable[[Path], bool] | None,
) -> Finding:
    topology = read_topology(Sysfs.below(host.root))
    nics = [nic for nic in topology.nics if nic.fabric == fabric.name]
    library = host.library(fabric.soname)
    facts = [
        f"{fabric.soname} is at {library}" if library else f"{fabric.soname} is not installed",
        f"{fabric.devices}: {len(nics) or 'none'}",
    ]
    if fabric.name not in (built_fabrics() if built is None else built):
        facts.insert(0, "not built into the native engine")
        rebuild = f"with {fabric.headers} installed: pip install --force-reinstall --no-deps kvxfer"
        return _finding(fabric, Status.ABSENT, facts, [rebuild] if nics else [])
    if not nics:
        return _finding(fabric, Status.ABSENT, facts, [])
    remedies = [] if library else [fabric.install]
    _examine_ports(nics, facts, remedies)
    _examine_device_files(host, nics, may_open or _may_open, facts, remedies)
    _examine_locked_memory(host, locked, facts, remedies)
    return _finding(fabric, Status.LIMITED if remedies else Status.OK, facts, remedies)


def _examine_ports(nics: Sequence[Nic], facts: list[str], remedies: list[str]) -> None:
    active = sum(nic.active for nic in nics)
    if active < len(nics):
        facts.append(f"{active or 'none'} of them with an active port")
    if active == 0:
        remedies.append("bring a port up: rdma link, ip link set NETDEV up, the cable, the switch")


def _examine_device_files(
    host: Host,
    nics: Sequence[Nic],
    may_open: Callable[[Path], bool],
    facts: list[str],
    remedies: list[str],
) -> None:
    """Checks the device files. A container may have those of only some NICs, so one is enough."""
    names = {nic.name for nic in nics}
    files = [
        host.root / "dev/infiniband" / entry.name
        for entry in host.entries("sys/class/infiniband_verbs")
        if host.text(f"sys/class/infiniband_verbs/{entry.name}/ibdev") in names
    ]
    openable = sum(may_open(file) for file in files)
    if openable < len(nics):
        facts.append(f"/dev/infiniband/uverbs* of {openable or 'none'} can be opened")
    if not files:
        remedies.append("modprobe ib_uverbs")
    elif openable == 0:
        remedies.append(
            "give this process read and write access to /dev/infiniband/uverbs* (a container: "
            "--device /dev/infiniband, or the device plugin of its NICs)"
        )


def _examine_locked_memory(
    host: Host, locked: tuple[int, int] | None, facts: list[str], remedies: list[str]
) -> None:
    lockable = lockable_memory(host, locked)
    if lockable is not None:
        facts.append(f"only {lockable >> 10} KiB of memory may be locked; registering locks all")
        remedies.append(
            "ulimit -l unlimited, LimitMEMLOCK=infinity of the service, --ulimit memlock=-1 of the "
            "container"
        )


def _finding(
    fabric: _Fabric, status: Status, facts: Sequence[str], remedies: Sequence[str]
) -> Finding:
    return Finding(Area.FABRICS, fabric.name, status, "; ".join(facts), "; ".join(remedies) or None)


def _may_open(file: Path) -> bool:
    return os.access(file, os.R_OK | os.W_OK)
