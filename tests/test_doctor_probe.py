"""`kvxfer doctor --probe`: what /sys says of NICs, and bytes sent through them."""

import threading
from pathlib import Path

import pytest

from kvxfer.doctor import loopback as loopbacks
from kvxfer.doctor import nic_fabrics, pcie
from kvxfer.doctor.examination import Hardware, loopback_findings, send_loopbacks
from kvxfer.doctor.finding import Finding, Status
from kvxfer.doctor.host import Host
from kvxfer.doctor.loopback import Loopback, Sent, Verdict, loopback
from kvxfer.doctor.nic_details import Gid, NicDetails, PKey, findings, read_nics
from kvxfer.doctor.nic_fabrics import Library
from kvxfer.doctor.pcie import Acs, PcieDevice
from kvxfer.errors import EngineError, FabricUnavailable
from tests.topology import machines
from tests.topology.sysfs_builder import SysfsBuilder
from verify.polling import PATIENCE

SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"
MLX5 = f"{SWITCH}/0000:18:00.0"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0007"


@pytest.fixture
def sysfs(tmp_path: Path) -> SysfsBuilder:
    return SysfsBuilder(tmp_path / "sys")


def roce(sysfs: SysfsBuilder, **device: str) -> str:
    """Writes a healthy ConnectX-7 with one Ethernet port; returns the port's folder."""
    sysfs.write({"devices/system/node/node0/cpulist": "0-7"})
    sysfs.pci_device("pci0000:15/0000:15:01.0")
    sysfs.pci_device(SWITCH)
    place = sysfs.pci_device(
        MLX5,
        **{
            "vendor": "0x15b3",
            "device": "0x1021",
            "numa_node": "0",
            "current_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "16",
            "max_link_speed": "32.0 GT/s PCIe",
            "max_link_width": "16",
        }
        | device,
    )
    sysfs.link(f"{place}/driver", "../../../../../bus/pci/drivers/mlx5_core")
    sysfs.link(f"{place}/iommu_group", "../../../../../kernel/iommu_groups/41")
    nic = sysfs.nic(place, "mlx5_0", state="4: ACTIVE", rate="400 Gb/sec (4X NDR)")
    port = f"{nic}/ports/1"
    sysfs.write(
        {
            f"{nic}/fw_ver": "28.39.1002",
            f"{nic}/board_id": "MT_0000000838",
            f"{nic}/node_guid": "0c42:a103:0000:0001",
            f"{port}/link_layer": "Ethernet",
            f"{port}/phys_state": "5: LinkUp",
            f"{port}/pkeys/0": "0xffff",
            "module/mlx5_core/version": "24.10-0.7.0",
            "kernel/iommu_groups/41/type": "identity",
            "class/net/ens1/mtu": "9000",
        }
    )
    gid(sysfs, port, 0, LINK_LOCAL, "IB/RoCE v1")
    gid(sysfs, port, 3, IPV4, "RoCE v2")
    return port


def gid(sysfs: SysfsBuilder, port: str, index: int, address: str, kind: str) -> None:
    sysfs.write(
        {
            f"{port}/gids/{index}": address,
            f"{port}/gid_attrs/types/{index}": kind,
            f"{port}/gid_attrs/ndevs/{index}": "ens1",
        }
    )


def only_nic(sysfs: SysfsBuilder) -> NicDetails:
    (nic,) = read_nics(Host(sysfs.folder.parent, {}))
    return nic


def row(sysfs: SysfsBuilder, name: str) -> Finding:
    return {finding.name: finding for finding in findings(only_nic(sysfs))}[name]


# --- a NIC and its ports ---------------------------------------------------------------------


def test_a_healthy_roce_nic_is_shown_with_all_facts_of_sysfs(sysfs: SysfsBuilder) -> None:
    roce(sysfs)
    shown = {finding.name: finding for finding in findings(only_nic(sysfs))}
    assert list(shown) == ["mlx5_0", "mlx5_0 port 1", "mlx5_0 port 1 GIDs", "mlx5_0 PCIe"]
    assert shown["mlx5_0"].detail == (
        "mlx5_core 24.10-0.7.0, firmware 28.39.1002, board MT_0000000838, "
        "PCI 0000:18:00.0 (0x15b3:0x1021), NUMA node 0, node GUID 0c42:a103:0000:0001"
    )
    assert shown["mlx5_0 port 1"].detail.startswith(
        "ACTIVE, LinkUp, 400 Gb/sec (4X NDR), Ethernet, ens1 MTU 9000, RDMA MTU up to 4096 of 4096 "
    )
    assert "P_Keys 0: 0xffff, trust and PFC not readable" in shown["mlx5_0 port 1"].detail
    assert shown["mlx5_0 PCIe"].detail == (
        "32.0 GT/s x16 of 32.0 GT/s x16, relaxed ordering, payload and read request sizes are "
        "readable to root alone, IOMMU group 41 (identity)"
    )
    assert {finding.remedy for finding in shown.values()} == {None}


def test_a_port_has_several_roce_v2_gids_and_unused_entries_are_left_out(
    sysfs: SysfsBuilder,
) -> None:
    port = roce(sysfs)
    gid(sysfs, port, 10, "2001:0db8:0000:0000:0000:0000:0000:0005", "RoCE v2")
    sysfs.write({f"{port}/gids/{index}": ZERO for index in (4, 5)})
    assert only_nic(sysfs).ports[0].gids == (
        Gid(0, "IB/RoCE v1", "fe80::e42:a1ff:fe00:1", "ens1"),
        Gid(3, "RoCE v2", "10.0.0.7", "ens1"),
        Gid(10, "RoCE v2", "2001:db8::5", "ens1"),
    )
    assert row(sysfs, "mlx5_0 port 1 GIDs").detail.endswith("; 10: RoCE v2 2001:db8::5 ens1")


def test_a_roce_port_without_roce_v2_is_limited(sysfs: SysfsBuilder) -> None:
    port = roce(sysfs)
    sysfs.write({f"{port}/gids/3": ZERO})
    found = row(sysfs, "mlx5_0 port 1 GIDs")
    assert (found.status, "no RoCE v2" in found.detail) == (Status.LIMITED, True)
    assert found.remedy == "give ens1 an IP address, and bring it up"


@pytest.mark.parametrize(
    ("pkeys", "status", "says", "remedy"),
    [
        ({"0": "0xffff", "1": "0x0000"}, Status.OK, "P_Keys 0: 0xffff, ", None),
        ({"0": "0x7fff", "1": "0x8001"}, Status.OK, "takes 0x8001 and not the default", None),
        ({"0": "0x0012"}, Status.LIMITED, "takes 0x0012: no limited", "member: 0x8012"),
        ({"0": "0x8012"}, Status.OK, "takes 0x8012 and not the default 0xffff", None),
        ({"0": "0x0000", "2": "0xffff"}, Status.OK, "P_Keys 2: 0xffff", None),
    ],
)
def test_the_partition_that_the_engine_takes_is_judged(
    sysfs: SysfsBuilder, pkeys: dict[str, str], status: Status, says: str, remedy: str | None
) -> None:
    port = roce(sysfs)
    sysfs.write({f"{port}/pkeys/{index}": value for index, value in pkeys.items()})
    found = row(sysfs, "mlx5_0 port 1")
    assert (found.status, says in found.detail) == (status, True)
    assert (found.remedy or "").endswith(remedy or "")
    assert (found.remedy is None) == (remedy is None)
    assert only_nic(sysfs).ports[0].pkeys == tuple(
        PKey(int(index), value) for index, value in pkeys.items() if value != "0x0000"
    )


@pytest.mark.parametrize(
    ("netdev_mtu", "rdma_mtu"),
    [("9000", 4096), ("4192", 4096), ("4191", 2048), ("1500", 1024), ("68", None)],
)
def test_the_network_device_bounds_the_rdma_mtu(
    sysfs: SysfsBuilder, netdev_mtu: str, rdma_mtu: int | None
) -> None:
    roce(sysfs)
    sysfs.write({"class/net/ens1/mtu": netdev_mtu})
    assert only_nic(sysfs).ports[0].roce_mtu == rdma_mtu
    small = rdma_mtu is not None and rdma_mtu < 4096
    assert ("ip link set ens1 mtu" in (row(sysfs, "mlx5_0 port 1").remedy or "")) == small


def test_a_port_that_is_down_comes_with_a_remedy(sysfs: SysfsBuilder) -> None:
    port = roce(sysfs)
    sysfs.write({f"{port}/state": "1: DOWN", f"{port}/phys_state": "3: Disabled"})
    found = row(sysfs, "mlx5_0 port 1")
    assert (found.status, found.detail[:15]) == (Status.LIMITED, "DOWN, Disabled,")
    assert found.remedy == "rdma link, ip link set ens1 up, the cable, the switch"


def test_marks_and_counters_are_read_if_the_driver_shows_them(sysfs: SysfsBuilder) -> None:
    port = roce(sysfs)
    nic = port.removesuffix("/ports/1")
    sysfs.write(
        {
            f"{nic}/tc/1/traffic_class": "Global tclass=106",
            "kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos": "106",
            **{f"class/net/ens1/ecn/roce_np/enable/{each}": str(each % 2) for each in range(4)},
            f"{port}/counters/link_downed": "3",
            f"{port}/counters/VL15_dropped": "N/A (no PMA)",
            f"{port}/hw_counters/out_of_sequence": "17",
            f"{port}/hw_counters/lifespan": "10",
        }
    )
    (found,) = only_nic(sysfs).ports
    assert (found.qos.traffic_class, found.qos.rdma_cm_tos) == ("Global tclass=106", "106")
    assert (found.qos.ecn_notifies, found.qos.ecn_reacts) == ((1, 3), ())
    assert found.counters == {"link_downed": 3, "out_of_sequence": 17}
    assert "ECN notifies for priorities 1 3" in row(sysfs, "mlx5_0 port 1").detail


@pytest.mark.parametrize(
    ("device", "generation"), [("0xefa0", 1), ("0xefa1", 2), ("0xefa2", 3), ("0xefa3", 4)]
)
def test_an_efa_is_shown_with_its_generation(
    sysfs: SysfsBuilder, device: str, generation: int
) -> None:
    place = sysfs.pci_device("pci0000:44/0000:55:00.0", vendor="0x1d0f", device=device)
    sysfs.link(f"{place}/driver", "../../../bus/pci/drivers/efa")
    port = f"{sysfs.nic(place, 'rdmap85s0', state='4: ACTIVE', link_layer='Unknown')}/ports/1"
    sysfs.write({f"{port}/gids/0": LINK_LOCAL, "module/efa/version": "2.13.0"})
    nic = only_nic(sysfs)
    assert (nic.fabric, nic.efa_generation, nic.driver_version) == ("ofi", generation, "2.13.0")
    assert nic.ports[0].gids == (Gid(0, None, "fe80::e42:a1ff:fe00:1", None),)
    assert row(sysfs, "rdmap85s0").detail.startswith(f"efa 2.13.0, EFA generation {generation}, ")
    # A virtual function does not report its link.
    assert row(sysfs, "rdmap85s0 PCIe").status is Status.INFO


@pytest.mark.parametrize(("name", "nics"), [("p5en", 16), ("dgx", 8), ("laptop", 0)])
def test_facts_that_a_host_does_not_report_are_left_out(
    tmp_path: Path, name: str, nics: int
) -> None:
    hardware = Hardware.read(Host(machines.write(name, tmp_path), {}))
    assert len(hardware.nics) == nics
    assert hardware.gpus == (0 if name == "laptop" else 8)
    names = [finding.name for finding in hardware.findings()]
    assert names[-2:] == ["IOMMU", "libraries"]
    assert ("ACS" in names) == (nics > 0)


# --- PCIe ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "slot", "status", "remedy"),
    [
        ({}, {}, Status.OK, None),
        ({"current_link_width": "8"}, {}, Status.LIMITED, "reseat the NIC at 0000:18:00.0, "),
        ({"current_link_speed": "16.0 GT/s PCIe"}, {}, Status.LIMITED, "reseat the NIC at "),
        (
            {"current_link_width": "8"},
            {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "8"},
            Status.LIMITED,
            "move the NIC at 0000:18:00.0 to a faster slot",
        ),
        ({"current_link_speed": "Unknown", "current_link_width": "0"}, {}, Status.INFO, None),
    ],
)
def test_a_degraded_link_is_a_limit(
    sysfs: SysfsBuilder,
    files: dict[str, str],
    slot: dict[str, str],
    status: Status,
    remedy: str | None,
) -> None:
    roce(sysfs, **files)
    sysfs.write({f"devices/{SWITCH}/{name}": text for name, text in slot.items()})
    found = row(sysfs, "mlx5_0 PCIe")
    assert (found.status, "degraded" in found.detail) == (status, status is Status.LIMITED)
    assert (found.remedy or "").startswith(remedy or "")
    assert (found.remedy is None) == (remedy is None)


def config_space(nbytes: int, registers: dict[int, int]) -> bytes:
    """Returns a configuration space of 32-bit registers at these offsets."""
    space = bytearray(nbytes)
    for offset, value in registers.items():
        space[offset : offset + 4] = value.to_bytes(4, "little")
    return bytes(space)


def acs_space(control: int) -> bytes:
    """Returns the space of a bridge whose second extended capability is ACS."""
    return config_space(4096, {0x100: 0x14810001, 0x148: 0x0001000D, 0x14C: control << 16 | 0x1F})


def place_of(sysfs: SysfsBuilder) -> PcieDevice:
    place = only_nic(sysfs).pcie
    assert place is not None
    return place


def test_relaxed_ordering_and_sizes_are_in_the_device_control_register(
    sysfs: SysfsBuilder,
) -> None:
    roce(sysfs)
    # Power management at 0x40, PCI Express at 0x60; 4096 bytes a read, 256 a packet, ordering on.
    registers = {0x04: 1 << 20, 0x34: 0x40, 0x40: 0x6001, 0x60: 0x00020010, 0x68: 0x5030}
    config = sysfs.folder / "devices" / MLX5 / "config"
    config.write_bytes(config_space(4096, registers))
    place = place_of(sysfs)
    assert place.relaxed_ordering is True
    assert (place.max_payload_bytes, place.max_read_request_bytes) == (256, 4096)
    assert "relaxed ordering on, payload 256 bytes" in row(sysfs, "mlx5_0 PCIe").detail
    # Users other than root can read only this part.
    config.write_bytes(config.read_bytes()[:64])
    assert place_of(sysfs).relaxed_ordering is None


@pytest.mark.parametrize("loop_to", [0x40, 0x60])
def test_a_circular_list_of_capabilities_ends(sysfs: SysfsBuilder, loop_to: int) -> None:
    roce(sysfs)
    registers = {0x04: 1 << 20, 0x34: 0x40, 0x40: 0x6001, 0x60: loop_to << 8 | 5}
    (sysfs.folder / "devices" / MLX5 / "config").write_bytes(config_space(4096, registers))
    assert place_of(sysfs).relaxed_ordering is None


@pytest.mark.parametrize(
    ("config", "acs", "gpus", "status", "says"),
    [
        (acs_space(0b1101), Acs.REDIRECT, 8, Status.LIMITED, "GPUDirect goes through the CPU"),
        (acs_space(0b1101), Acs.REDIRECT, 0, Status.INFO, "this host has no GPU"),
        (acs_space(0b0001), Acs.OFF, 8, Status.OK, "no redirect on the bridges above NICs: 2"),
        (config_space(4096, {}), Acs.NONE, 8, Status.OK, "no redirect"),
        (config_space(256, {}), Acs.NONE, 8, Status.OK, "no redirect"),
        (None, Acs.UNREADABLE, 8, Status.INFO, "not readable on 0000:15:01.0, 0000:16:00.0"),
    ],
)
def test_bridges_that_redirect_peer_to_peer_traffic_limit_hosts_with_gpus(
    sysfs: SysfsBuilder, config: bytes | None, acs: Acs, gpus: int, status: Status, says: str
) -> None:
    roce(sysfs)
    for bridge in ("pci0000:15/0000:15:01.0", SWITCH):
        if config is not None:
            (sysfs.folder / "devices" / bridge / "config").write_bytes(config)
    place = place_of(sysfs)
    assert [(bridge.address, bridge.acs) for bridge in place.bridges] == [
        ("0000:15:01.0", acs),
        ("0000:16:00.0", acs),
    ]
    found = pcie.acs([place], gpus)
    assert (found.status, says in found.detail) == (status, True)
    assert ("setpci -s 0000:15:01.0" in (found.remedy or "")) == (status is Status.LIMITED)


def test_the_iommu_is_shown_with_its_options_and_nothing_else_of_the_command_line(
    tmp_path: Path,
) -> None:
    sysfs = SysfsBuilder(tmp_path / "sys")
    sysfs.write({"class/iommu/dmar0/intel-iommu/version": "1:0"})
    sysfs.write({f"kernel/iommu_groups/{group}/type": "DMA-FQ" for group in range(3)})
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("root=UUID=12 token=hush intel_iommu=on iommu=pt quiet")
    found = pcie.iommu(pcie.read_iommu(Host(tmp_path, {})))
    assert found.detail == "dmar0; groups DMA-FQ: 3; kernel options: intel_iommu=on iommu=pt"
    (tmp_path / "nothing").mkdir()
    none = pcie.iommu(pcie.read_iommu(Host(tmp_path / "nothing", {})))
    assert none.detail == "none in use; kernel options: none"


def test_libraries_are_shown_with_their_version(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib64"
    folder.mkdir(parents=True)
    (folder / "libibverbs.so.1.14.50.0").touch()
    (folder / "libibverbs.so.1").symlink_to("libibverbs.so.1.14.50.0")
    (folder / "libfabric.so.1").touch()
    host = Host(tmp_path, {})
    assert nic_fabrics.libraries(host, lambda path: "2.1") == (
        Library("libibverbs.so.1", str(folder / "libibverbs.so.1"), "rdma-core 50.0"),
        Library("libfabric.so.1", str(folder / "libfabric.so.1"), "2.1"),
    )
    assert nic_fabrics.libraries(host)[1].version is None  # an empty file cannot be loaded
    named = Host(tmp_path / "none", {"KVXFER_LIBFABRIC": str(folder / "libfabric.so.1")})
    (library,) = nic_fabrics.libraries(named, lambda path: path.name)
    assert library.version == "libfabric.so.1"


# --- loopback --------------------------------------------------------------------------------


@pytest.mark.native
@pytest.mark.parametrize("fabric", ["tcp", "local"])
def test_bytes_are_sent_over_a_fabric_and_compared(fabric: str) -> None:
    found = loopback(fabric, deadline_seconds=PATIENCE)
    assert (found.verdict, found.error) == (Verdict.OK, None)
    assert [each.nbytes for each in found.sent] == [16 << 10, 4 << 20]
    assert found.sent[1].writes > 1
    assert loopbacks.finding(found).detail.endswith("ms; every byte compared")


@pytest.mark.native
def test_bytes_are_sent_through_each_nic_of_this_host_alone() -> None:
    nics = read_nics(Host())
    if not nics:
        pytest.skip("no RDMA NIC")
    found = [loopback(nic.fabric, nic.name, deadline_seconds=PATIENCE) for nic in nics]
    assert [(each.nic, each.error) for each in found] == [(nic.name, None) for nic in nics]
    assert {sum(sent.nbytes for sent in each.sent) for each in found} == {(16 << 10) + (4 << 20)}


@pytest.mark.native
def test_a_nic_that_cannot_be_opened_is_refused_with_a_remedy() -> None:
    found = loopback("verbs", "mlx5_99")
    assert (found.verdict, found.code, found.sent) == (
        Verdict.REFUSED,
        "fabric-unavailable",
        (),
    )
    assert (found.error or "").startswith("opening two engines: ")
    row = loopbacks.finding(found)
    assert (row.name, row.status) == ("verbs mlx5_99", Status.LIMITED)
    assert row.remedy is not None


def test_a_driver_that_does_not_return_is_a_failure_and_blocks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returns = threading.Event()

    async def hang(attempt: object) -> None:
        returns.wait()

    monkeypatch.setattr(loopbacks, "_exchange", hang)
    found = loopback("verbs", "mlx5_0", deadline_seconds=0.0)
    returns.set()
    assert (found.verdict, found.code) == (Verdict.FAILED, "deadline-exceeded")
    assert (found.error or "").endswith(" does not return")


@pytest.mark.parametrize(
    ("error", "verdict", "says"),
    [
        (FabricUnavailable("no port"), Verdict.REFUSED, "loading the engine: no port"),
        (EngineError("it broke"), Verdict.FAILED, "loading the engine: it broke"),
        (ValueError("a defect"), Verdict.FAILED, "loading the engine: ValueError: a defect"),
    ],
)
def test_every_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: Verdict, says: str
) -> None:
    async def fail(attempt: object) -> None:
        raise error

    monkeypatch.setattr(loopbacks, "_exchange", fail)
    found = loopback("ofi", "rdmap85s0")
    assert (found.verdict, found.error) == (verdict, says)


@pytest.mark.parametrize(
    ("fabric", "nic", "status"),
    [
        ("tcp", None, Status.BROKEN),
        ("local", None, Status.LIMITED),
        ("verbs", "mlx5_0", Status.LIMITED),
    ],
)
def test_only_a_failure_of_tcp_breaks_the_core(
    fabric: str, nic: str | None, status: Status
) -> None:
    found = loopbacks.finding(Loopback(fabric, nic, Verdict.FAILED, (), "nic-lost", "it broke"))
    assert (found.status, found.detail) == (status, "failed [nic-lost] it broke")
    assert found.remedy is not None


def test_each_nic_is_tried_over_its_fabric_and_so_are_tcp_and_local(
    sysfs: SysfsBuilder,
) -> None:
    roce(sysfs)

    def send(fabric: str, nic: str | None, gpu: int | None) -> Loopback:
        return Loopback(fabric, nic, Verdict.OK, (Sent(16 << 10, 1, 0.001),), gpu=gpu)

    found = send_loopbacks([only_nic(sysfs)], send=send)
    assert [each.name for each in found] == ["verbs mlx5_0", "tcp", "local"]
    assert [row.name for row in loopback_findings(found)] == ["verbs mlx5_0", "tcp", "local"]
    with_gpu = send_loopbacks([only_nic(sysfs)], 1, send)
    assert [each.name for each in with_gpu] == [
        *("verbs mlx5_0", "tcp", "local", "verbs mlx5_0, GPU 0", "tcp, GPU 0", "local, GPU 0")
    ]
    alone = loopback_findings(send_loopbacks([], send=send))
    assert [(row.name, row.status) for row in alone] == [
        ("RDMA", Status.ABSENT),
        ("tcp", Status.OK),
        ("local", Status.OK),
    ]
