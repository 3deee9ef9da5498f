"""Details of each RDMA NIC in /sys, for a report of a problem with it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.doctor import pcie
from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host
from kvxfer.doctor.pcie import PcieDevice, read_pcie
from kvxfer.topology import Nic, Port, Sysfs, read_topology

_INFINIBAND = "class/infiniband"
_ETHERNET = "Ethernet"
# Headers of a RoCE packet, as the kernel counts them (iboe_get_mtu); the largest MTU first.
_ROCE_HEADER_BYTES = 96
_RDMA_MTUS = (4096, 2048, 1024, 512, 256)
_ENOUGH_NETDEV_MTU = 4200
_DEFAULT_PKEY = 0xFFFF
_FULL_MEMBER = 0x8000  # a bit of a P_Key
_EFA_GENERATIONS = {"0xefa0": 1, "0xefa1": 2, "0xefa2": 3, "0xefa3": 4}


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table that is in use. `type` is "RoCE v2", or "IB/RoCE v1"."""

    index: int
    type: str | None
    address: str
    netdev: str | None


@dataclass(frozen=True, slots=True)
class PKey:
    """An entry of a port's P_Key table that is in use, such as "0xffff"."""

    index: int
    value: str


@dataclass(frozen=True, slots=True)
class Qos:
    """A port's packet marks that the driver shows without tools; None or empty if it does not.

    traffic_class: forced upon all packets (MLNX_OFED). rdma_cm_tos: the mark of connections made by
    rdma_cm. ecn_notifies, ecn_reacts: the priorities for which the NIC sends congestion
    notifications, and obeys them (MLNX_OFED). Trust in DSCP or PCP, and PFC, are never shown.
    """

    traffic_class: str | None
    rdma_cm_tos: str | None
    ecn_notifies: tuple[int, ...]
    ecn_reacts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PortDetails:
    """A port. `roce_mtu` is the largest RDMA MTU that the network device's MTU permits: /sys does
    not show the active one. `counters` are the port's totals since the driver was loaded."""

    number: int
    link_layer: str
    state: str
    physical_state: str | None
    rate: str | None
    netdev: str | None
    netdev_mtu: int | None
    roce_mtu: int | None
    gids: tuple[Gid, ...]
    pkeys: tuple[PKey, ...]
    qos: Qos
    counters: dict[str, int]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class NicDetails:
    """An RDMA NIC. `efa_generation` is None for all others; `pcie` is None for Soft-RoCE."""

    name: str
    fabric: str
    driver: str | None
    driver_version: str | None
    firmware: str | None
    board: str | None
    node_guid: str | None
    efa_generation: int | None
    numa_node: int | None
    ports: tuple[PortDetails, ...]
    pcie: PcieDevice | None


def read_nics(host: Host) -> tuple[NicDetails, ...]:
    """Reads every RDMA NIC of the host, in the order of the topology."""
    sysfs = Sysfs.below(host.root)
    return tuple(_nic(sysfs, nic) for nic in read_topology(sysfs).nics)


# --- findings --------------------------------------------------------------------------------


def findings(nic: NicDetails) -> list[Finding]:
    """Returns the rows of a NIC: itself, its ports with their GIDs, its PCIe link."""
    rows = [_identity(nic)]
    for port in nic.ports:
        rows.append(_port_finding(nic, port))
        if port.gids or port.link_layer == _ETHERNET:
            rows.append(_gids_finding(nic, port))
    if nic.pcie is not None:
        rows.append(pcie.link(nic.name, nic.pcie))
    return rows


def _identity(nic: NicDetails) -> Finding:
    place = nic.pcie
    driver = f"{nic.driver} {nic.driver_version or '(version not readable)'}"
    facts = [
        ("", driver if nic.driver else None),
        ("EFA generation ", nic.efa_generation),
        ("firmware ", nic.firmware),
        ("board ", nic.board),
        ("PCI ", place and f"{place.address} ({place.vendor}:{place.device})"),
        ("NUMA node ", nic.numa_node),
        ("node GUID ", nic.node_guid),
    ]
    text = ", ".join(f"{what}{value}" for what, value in facts if value not in (None, ""))
    return Finding(Area.HARDWARE, nic.name, Status.INFO, text)


def _port_finding(nic: NicDetails, port: PortDetails) -> Finding:
    physical = (port.physical_state or "").rpartition(": ")[2]
    facts = [port.state, physical, port.rate, port.link_layer]
    if port.netdev is not None:
        facts.append(f"{port.netdev} MTU {port.netdev_mtu or 'not readable'}")
    if port.roce_mtu is not None:
        most = f"{port.roce_mtu} of {_RDMA_MTUS[0]}"
        facts.append(f"RDMA MTU up to {most} (the active one is not in /sys)")
    facts.append(f"P_Keys {_pkeys_text(port.pkeys)}")
    facts.append(_qos_text(port))
    remedies = []
    if not port.active:
        remedies.append(
            f"rdma link, ip link set {port.netdev or 'NETDEV'} up, the cable, the switch"
        )
    if nic.fabric == "verbs":
        if port.roce_mtu is not None and port.roce_mtu < _RDMA_MTUS[0]:
            remedies.append(
                f"ip link set {port.netdev} mtu {_ENOUGH_NETDEV_MTU} or more, on every host and "
                "switch of the way"
            )
        _judge_pkey(port.pkeys, facts, remedies)
    return Finding(
        Area.HARDWARE,
        f"{nic.name} port {port.number}",
        Status.LIMITED if remedies else Status.OK,
        ", ".join(filter(None, facts)),
        "; ".join(remedies) or None,
    )


def _judge_pkey(pkeys: Sequence[PKey], facts: list[str | None], remedies: list[str]) -> None:
    """Judges the partition that the engine takes: the first one in which the port is a full member,
    otherwise the first."""
    if not pkeys:
        return
    keys = [int(pkey.value, 16) for pkey in pkeys]
    taken = next((key for key in keys if key & _FULL_MEMBER), keys[0])
    if not taken & _FULL_MEMBER:
        full = taken | _FULL_MEMBER
        facts.append(f"the engine takes {taken:#06x}: no limited member can reach another one")
        remedies.append(f"have the subnet manager make the port a full member: {full:#06x}")
    elif taken != _DEFAULT_PKEY:
        facts.append(
            f"the engine takes {taken:#06x} and not the default {_DEFAULT_PKEY:#06x}: peers need "
            "the same partition"
        )


def _gids_finding(nic: NicDetails, port: PortDetails) -> Finding:
    name = f"{nic.name} port {port.number} GIDs"
    shown = "; ".join(f"{gid.index}: {_address_text(gid)}" for gid in port.gids)
    ethernet = port.link_layer == _ETHERNET
    if not ethernet or any(gid.type == "RoCE v2" for gid in port.gids):
        return Finding(Area.HARDWARE, name, Status.OK, shown)
    return Finding(
        Area.HARDWARE,
        name,
        Status.LIMITED,
        f"{shown or 'none'}: no RoCE v2, which routed networks need",
        f"give {port.netdev or 'the network device'} an IP address, and bring it up",
    )


def _address_text(gid: Gid) -> str:
    return " ".join(filter(None, (gid.type, gid.address, gid.netdev)))


def _pkeys_text(pkeys: Sequence[PKey]) -> str:
    return " ".join(f"{pkey.index}: {pkey.value}" for pkey in pkeys) or "not readable"


def _qos_text(port: PortDetails) -> str | None:
    if port.link_layer != _ETHERNET:
        return None
    qos = port.qos
    facts = [
        ("traffic class ", qos.traffic_class),
        ("rdma_cm TOS ", qos.rdma_cm_tos),
        ("ECN notifies for priorities ", " ".join(map(str, qos.ecn_notifies))),
        ("ECN reacts for priorities ", " ".join(map(str, qos.ecn_reacts))),
        ("trust and PFC not readable: ", f"mlnx_qos -i {port.netdev or 'NETDEV'} shows them"),
    ]
    return ", ".join(f"{what}{value}" for what, value in facts if value)


# --- /sys ------------------------------------------------------------------------------------


def _nic(sysfs: Sysfs, nic: Nic) -> NicDetails:
    folder = f"{_INFINIBAND}/{nic.name}"
    place = read_pcie(sysfs, nic.location.pci_path)
    efa = _EFA_GENERATIONS.get(place.device or "") if place and nic.fabric == "ofi" else None
    return NicDetails(
        name=nic.name,
        fabric=nic.fabric,
        driver=nic.driver,
        driver_version=sysfs.text(f"module/{nic.driver}/version") if nic.driver else None,
        firmware=sysfs.text(f"{folder}/fw_ver"),
        board=sysfs.text(f"{folder}/board_id"),
        node_guid=sysfs.text(f"{folder}/node_guid"),
        efa_generation=efa,
        numa_node=nic.location.numa_node,
        ports=tuple(_port(sysfs, nic, port) for port in nic.ports),
        pcie=place,
    )


def _port(sysfs: Sysfs, nic: Nic, port: Port) -> PortDetails:
    folder = f"{_INFINIBAND}/{nic.name}/ports/{port.number}"
    gids = _gids(sysfs, folder)
    netdev = next((gid.netdev for gid in gids if gid.netdev), nic.netdev)
    mtu_text = sysfs.text(f"class/net/{netdev}/mtu") or "" if netdev else ""
    mtu = int(mtu_text) if mtu_text.isdecimal() else None
    return PortDetails(
        number=port.number,
        link_layer=port.link_layer,
        state=port.state,
        physical_state=sysfs.text(f"{folder}/phys_state"),
        rate=sysfs.text(f"{folder}/rate"),
        netdev=netdev,
        netdev_mtu=mtu,
        roce_mtu=_roce_mtu(mtu) if mtu is not None and port.link_layer == _ETHERNET else None,
        gids=gids,
        pkeys=tuple(
            PKey(int(index), value)
            for index in _in_order(sysfs.names(f"{folder}/pkeys"))
            if (value := sysfs.text(f"{folder}/pkeys/{index}")) not in (None, "0x0000")
        ),
        qos=_qos(sysfs, nic, port, netdev),
        counters=_counters(sysfs, folder),
    )


def _gids(sysfs: Sysfs, port: str) -> tuple[Gid, ...]:
    found = []
    for index in _in_order(sysfs.names(f"{port}/gids")):
        text = sysfs.text(f"{port}/gids/{index}")
        try:
            address = ipaddress.IPv6Address(text or "::")
        except ValueError:
            continue
        if int(address) == 0:
            continue
        # An entry that is not in use has no type: reading it fails.
        kind = sysfs.text(f"{port}/gid_attrs/types/{index}")
        netdev = sysfs.text(f"{port}/gid_attrs/ndevs/{index}")
        found.append(Gid(int(index), kind, str(address.ipv4_mapped or address), netdev or None))
    return tuple(found)


def _qos(sysfs: Sysfs, nic: Nic, port: Port, netdev: str | None) -> Qos:
    configured = f"kernel/config/rdma_cm/{nic.name}/ports/{port.number}"
    ecn = f"class/net/{netdev}/ecn"
    return Qos(
        traffic_class=sysfs.text(f"{_INFINIBAND}/{nic.name}/tc/{port.number}/traffic_class"),
        rdma_cm_tos=sysfs.text(f"{configured}/default_roce_tos"),
        ecn_notifies=_enabled(sysfs, f"{ecn}/roce_np/enable"),
        ecn_reacts=_enabled(sysfs, f"{ecn}/roce_rp/enable"),
    )


def _enabled(sysfs: Sysfs, folder: str) -> tuple[int, ...]:
    priorities = _in_order(sysfs.names(folder))
    return tuple(int(each) for each in priorities if sysfs.text(f"{folder}/{each}") == "1")


def _counters(sysfs: Sysfs, port: str) -> dict[str, int]:
    return {
        name: int(text)
        for folder in (f"{port}/counters", f"{port}/hw_counters")
        for name in sysfs.names(folder)
        if name != "lifespan" and (text := sysfs.text(f"{folder}/{name}") or "").isdecimal()
    }


def _roce_mtu(netdev_mtu: int) -> int | None:
    return next((mtu for mtu in _RDMA_MTUS if mtu + _ROCE_HEADER_BYTES <= netdev_mtu), None)


def _in_order(names: Sequence[str]) -> list[str]:
    return sorted(filter(str.isdecimal, names), key=int)
