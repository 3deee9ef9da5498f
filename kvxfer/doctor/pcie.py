"""A NIC's place on PCIe: its link, its settings, and bridges that redirect its traffic to GPUs.

Reads /sys only. Only root can read more than the first 64 bytes of a device's configuration space;
a value that cannot be read is None, or says so.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host
from kvxfer.topology import Sysfs

_DEVICES = "bus/pci/devices"
_PLAIN_SPACE_BYTES = 256  # a device with this much has no extended capabilities
_PCI_EXPRESS = 0x10
_ACS = 0x0D
_ACS_REDIRECTS = 0b1100  # peer-to-peer requests, and their completions
_IOMMU_OPTIONS = ("iommu", "intel_iommu", "amd_iommu", "arm-smmu", "pci")


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The current link, and the best that the device could have. None if the device does not say,
    as virtual functions do not."""

    speed: str | None
    width: int | None
    max_speed: str | None
    max_width: int | None

    @property
    def degraded(self) -> bool:
        slower = _gigatransfers(self.speed) < _gigatransfers(self.max_speed)
        narrower = (self.width or 0) < (self.max_width or 0)
        return self.known and (slower or narrower)

    @property
    def known(self) -> bool:
        return self.speed is not None and self.width is not None


class Acs(StrEnum):
    """The effect of a bridge's Access Control Services on traffic between two devices below it."""

    REDIRECT = "redirect"  # up to the root complex
    OFF = "off"
    NONE = "none"  # the bridge has no ACS
    UNREADABLE = "not readable"


@dataclass(frozen=True, slots=True)
class Bridge:
    """A PCI bridge above a NIC. `acs_control` is the control register."""

    address: str
    acs: Acs
    acs_control: int | None


@dataclass(frozen=True, slots=True)
class PcieDevice:
    """A device's place on PCIe. `slot` is the link as the bridge right above it sees it;
    `iommu_type` the type of the IOMMU group: "DMA" and "DMA-FQ" translate, "identity" does not."""

    address: str
    vendor: str | None
    device: str | None
    link: PcieLink
    slot: PcieLink | None
    relaxed_ordering: bool | None
    max_payload_bytes: int | None
    max_read_request_bytes: int | None
    iommu_group: str | None
    iommu_type: str | None
    bridges: tuple[Bridge, ...]


@dataclass(frozen=True, slots=True)
class Iommu:
    """The host's IOMMUs. `units` are those in use, `groups` counts groups of devices by type,
    `options` are the kernel's command-line options about IOMMU and PCI."""

    units: tuple[str, ...]
    groups: dict[str, int]
    options: tuple[str, ...]


def read_pcie(sysfs: Sysfs, pci_path: Sequence[str]) -> PcieDevice | None:
    """Reads the device at the end of `pci_path` (`Location.pci_path`); None if that is empty."""
    if not pci_path:
        return None
    above, address = pci_path[1:-1], pci_path[-1]
    device = f"{_DEVICES}/{address}"
    control = _device_control(sysfs.folder / device / "config")
    group = sysfs.link_name(f"{device}/iommu_group")
    return PcieDevice(
        address=address,
        vendor=sysfs.text(f"{device}/vendor"),
        device=sysfs.text(f"{device}/device"),
        link=_link(sysfs, device),
        slot=_link(sysfs, f"{_DEVICES}/{above[-1]}") if above else None,
        relaxed_ordering=None if control is None else bool(control >> 4 & 1),
        max_payload_bytes=None if control is None else 128 << (control >> 5 & 7),
        max_read_request_bytes=None if control is None else 128 << (control >> 12 & 7),
        iommu_group=group,
        iommu_type=sysfs.text(f"kernel/iommu_groups/{group}/type") if group else None,
        bridges=tuple(_bridge(sysfs, bridge) for bridge in above),
    )


def read_iommu(host: Host) -> Iommu:
    sysfs = Sysfs.below(host.root)
    groups = "kernel/iommu_groups"
    types = [sysfs.text(f"{groups}/{group}/type") or "unknown" for group in sysfs.names(groups)]
    options = (host.text("proc/cmdline") or "").split()
    return Iommu(
        units=tuple(sysfs.names("class/iommu")),
        groups=dict(sorted(Counter(types).items())),
        options=tuple(each for each in options if each.startswith(_IOMMU_OPTIONS)),
    )


# --- findings --------------------------------------------------------------------------------


def link(nic: str, device: PcieDevice) -> Finding:
    """Reports the link with its settings; a degraded one limits the NIC."""
    facts = [_link_text(device.link)]
    if device.relaxed_ordering is None:
        facts.append("relaxed ordering, payload and read request sizes are readable to root alone")
    else:
        facts.append(f"relaxed ordering {'on' if device.relaxed_ordering else 'off'}")
        facts.append(f"payload {device.max_payload_bytes} bytes")
        facts.append(f"read requests {device.max_read_request_bytes} bytes")
    if device.iommu_group is not None:
        kind = device.iommu_type or "type not readable"
        facts.append(f"IOMMU group {device.iommu_group} ({kind})")
    name = f"{nic} PCIe"
    if not device.link.degraded:
        status = Status.OK if device.link.known else Status.INFO
        return Finding(Area.HARDWARE, name, status, ", ".join(facts))
    facts[0] += ": the link is degraded"
    if device.slot is not None and _slower_slot(device.slot, device.link):
        facts[0] += f", its slot gives {device.slot.max_speed} x{device.slot.max_width} at most"
        remedy = f"move the NIC at {device.address} to a faster slot"
    else:
        remedy = (
            f"reseat the NIC at {device.address}, check slot, riser and the firmware's PCIe "
            f"settings; lspci -vv -s {device.address}"
        )
    return Finding(Area.HARDWARE, name, Status.LIMITED, ", ".join(facts), remedy)


def acs(devices: Sequence[PcieDevice], gpus: int) -> Finding:
    """Reports bridges above NICs that send the traffic between NIC and GPU through the CPU."""
    bridges = {bridge.address: bridge for device in devices for bridge in device.bridges}
    redirecting = [each.address for each in bridges.values() if each.acs is Acs.REDIRECT]
    unreadable = [each.address for each in bridges.values() if each.acs is Acs.UNREADABLE]
    if redirecting:
        detail = (
            f"bridges above NICs redirect peer-to-peer traffic ({', '.join(redirecting)}): "
            "GPUDirect goes through the CPU"
        )
        if gpus == 0:
            return Finding(Area.HARDWARE, "ACS", Status.INFO, f"{detail}; this host has no GPU")
        return Finding(
            Area.HARDWARE,
            "ACS",
            Status.LIMITED,
            detail,
            "on a host without virtual machines: switch ACS off in the firmware's settings, or "
            f"until reboot: setpci -s {redirecting[0]} ECAP_ACS+6.w=0000, for each bridge",
        )
    if unreadable:
        return Finding(
            Area.HARDWARE,
            "ACS",
            Status.INFO,
            f"not readable on {', '.join(unreadable)}",
            "run as root, on the host itself",
        )
    above = f"no redirect on the bridges above NICs: {len(bridges)}" if bridges else "no bridges"
    return Finding(Area.HARDWARE, "ACS", Status.OK, above)


def iommu(found: Iommu) -> Finding:
    if not found.units and not found.groups:
        facts = ["none in use"]
    else:
        facts = [
            ", ".join(found.units) or "no unit shown",
            "groups " + ", ".join(f"{kind}: {count}" for kind, count in found.groups.items()),
        ]
    facts.append(f"kernel options: {' '.join(found.options) or 'none'}")
    return Finding(Area.HARDWARE, "IOMMU", Status.INFO, "; ".join(facts))


def _link_text(found: PcieLink) -> str:
    if not found.known:
        return "link not readable (a virtual function does not say)"
    text = f"{found.speed} x{found.width}"
    if found.max_speed is not None and found.max_width is not None:
        text += f" of {found.max_speed} x{found.max_width}"
    return text


def _slower_slot(slot: PcieLink, device: PcieLink) -> bool:
    if slot.max_speed is None or slot.max_width is None:
        return False
    slower = _gigatransfers(slot.max_speed) < _gigatransfers(device.max_speed)
    return slower or slot.max_width < (device.max_width or 0)


# --- /sys ------------------------------------------------------------------------------------


def _link(sysfs: Sysfs, device: str) -> PcieLink:
    def speed(name: str) -> str | None:
        text = (sysfs.text(f"{device}/{name}_link_speed") or "").removesuffix(" PCIe")
        return text if _gigatransfers(text) > 0 else None

    def width(name: str) -> int | None:
        text = sysfs.text(f"{device}/{name}_link_width") or ""
        # 255 is the kernel's word for unknown.
        return int(text) if text.isdecimal() and 0 < int(text) < 255 else None

    return PcieLink(speed("current"), width("current"), speed("max"), width("max"))


def _gigatransfers(speed: str | None) -> float:
    """Returns the number of "32.0 GT/s"; 0 if it is no speed."""
    number, _, unit = (speed or "").partition(" ")
    with suppress(ValueError):
        return float(number) if unit == "GT/s" else 0.0
    return 0.0


def _bridge(sysfs: Sysfs, address: str) -> Bridge:
    config = sysfs.folder / _DEVICES / address / "config"
    try:
        with config.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size <= _PLAIN_SPACE_BYTES:
                return Bridge(address, Acs.NONE, None)
            at = _find(_extended_capabilities(file), _ACS)
            if at is None:
                return Bridge(address, Acs.NONE, None)
            control = _word(file, at + 4) >> 16
    except OSError:
        return Bridge(address, Acs.UNREADABLE, None)
    return Bridge(address, Acs.REDIRECT if control & _ACS_REDIRECTS else Acs.OFF, control)


def _device_control(config: Path) -> int | None:
    """Reads the Device Control register of the PCI Express capability; None if there is none, or if
    it may not be read."""
    try:
        with config.open("rb", buffering=0) as file:
            at = _find(_capabilities(file), _PCI_EXPRESS)
            return None if at is None else _word(file, at + 8) & 0xFFFF
    except OSError:
        return None


def _find(capabilities: Iterator[tuple[int, int]], wanted: int) -> int | None:
    return next((at for identity, at in capabilities if identity == wanted), None)


def _capabilities(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yields the id and offset of each. Raises OSError if they may not be read."""
    if not _word(file, 4) >> 20 & 1:  # the status register says that there is a list
        return
    at, seen = _word(file, 0x34) & 0xFC, set[int]()
    while at >= 0x40 and at not in seen:
        seen.add(at)
        header = _word(file, at)
        yield header & 0xFF, at
        at = header >> 8 & 0xFC


def _extended_capabilities(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yields the id and offset of each. Raises OSError if they may not be read."""
    at, seen = 0x100, set[int]()
    while at >= 0x100 and at not in seen:
        seen.add(at)
        header = _word(file, at)
        if header in (0, 0xFFFF_FFFF):
            return
        yield header & 0xFFFF, at
        at = header >> 20 & 0xFFC


def _word(file: BinaryIO, offset: int) -> int:
    file.seek(offset)
    data = file.read(4)
    if len(data) < 4:  # for users other than root the space ends after 64 bytes
        raise PermissionError(f"{file.name}: nothing at {offset:#x}")
    return int.from_bytes(data, "little")
