from pathlib import Path

import pytest

from kvxfer.topology import Gpu, Location, Nic, NumaNode, Port, Sysfs, Topology, read_topology
from kvxfer.topology.cpu_list import parse_cpu_list
from tests.topology.hosts import recorded
from tests.topology.sysfs_builder import SysfsBuilder

GPU = {"class": "0x030200", "vendor": "0x10de"}
SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"
UP = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}


@pytest.fixture
def sysfs(tmp_path: Path) -> SysfsBuilder:
    return SysfsBuilder(tmp_path / "sys")


def test_everything_about_a_connectx_is_read() -> None:
    cpus = parse_cpu_list("0-55,112-167")
    path = ("pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0")
    nic = recorded("dgx").nics[0]
    assert nic == Nic(
        "mlx5_0",
        "mlx5_core",
        "ibp24s0",
        (Port(1, "InfiniBand", "ACTIVE", 400_000_000_000),),
        Location(path, 0, cpus),
    )
    assert (nic.active, nic.bits_per_second, nic.fabric) == (True, 400_000_000_000, "verbs")
    assert nic.location.pci_address == "0000:18:00.0"


def test_everything_about_an_efa_device_is_read() -> None:
    nic = recorded("p5en").nics[-1]
    assert (nic.name, nic.driver, nic.netdev, nic.fabric) == ("rdmap163s0", "efa", None, "ofi")
    assert nic.ports == (Port(1, "Unknown", "ACTIVE", 200_000_000_000),)
    assert (nic.location.pci_address, nic.location.numa_node) == ("0000:a3:00.0", 1)


@pytest.mark.parametrize(
    ("machine", "gpus", "nics", "nodes"),
    [("p5en", 8, 16, 2), ("dgx", 8, 8, 2), ("laptop", 0, 0, 1)],
)
def test_machines_are_counted(machine: str, gpus: int, nics: int, nodes: int) -> None:
    found = recorded(machine)
    assert (len(found.gpus), len(found.nics), len(found.numa_nodes)) == (gpus, nics, nodes)


def test_nics_are_in_numeric_order() -> None:
    names = [nic.name for nic in recorded("p5en").nics]
    assert names[:5] == ["rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0", "rdmap110s0"]


# --- GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "pci_class", "found"),
    [
        ("0x10de", "0x030000", "nvidia"),
        ("0x10de", "0x030200", "nvidia"),
        ("0x10de", "0x068000", None),  # NVSwitch
        ("0x10de", "0x040300", None),  # a graphics card's audio function
        ("0x1002", "0x030000", "amd"),
        ("0x1002", "0x038000", "amd"),  # Instinct MI200
        ("0x1002", "0x120000", "amd"),  # Instinct MI300
        ("0x8086", "0x030000", None),
        ("0x1a03", "0x030000", None),  # a BMC's
        ("0x10de", "", None),
        ("", "0x030200", None),
    ],
)
def test_gpus_are_known_by_vendor_and_class(
    sysfs: SysfsBuilder, vendor: str, pci_class: str, found: str | None
) -> None:
    sysfs.pci_device("pci0000:00/0000:00:02.0", **{"class": pci_class, "vendor": vendor})
    assert [gpu.vendor for gpu in sysfs.read().gpus] == [found] * (found is not None)


def test_gpus_are_counted_as_nvidia_smi_does_and_amd_comes_after(sysfs: SysfsBuilder) -> None:
    sysfs.pci_device("pci0000:00/0000:00:02.0", **{"class": "0x030000", "vendor": "0x1002"})
    sysfs.pci_device("pci10000:00/10000:00:02.0", **GPU)  # PCI domains have 4 digits or more
    sysfs.pci_device("pci0002:00/0002:00:02.0", **GPU)
    found = [(gpu.index, gpu.location.pci_address) for gpu in sysfs.read().gpus]
    assert found == [(0, "0002:00:02.0"), (1, "10000:00:02.0"), (2, "0000:00:02.0")]


def test_a_pci_device_whose_link_dangles_is_passed_over(sysfs: SysfsBuilder) -> None:
    sysfs.link("bus/pci/devices/0000:00:02.0", "../../../devices/pci0000:00/0000:00:02.0")
    sysfs.pci_device("pci0000:00/0000:00:03.0", **GPU)
    assert [gpu.location.pci_address for gpu in sysfs.read().gpus] == ["0000:00:03.0"]


# --- NICs ------------------------------------------------------------------------------------


def test_a_port_that_is_down_makes_a_nic_inactive(sysfs: SysfsBuilder) -> None:
    device = sysfs.pci_device(f"{SWITCH}/0000:17:00.0")
    sysfs.nic(device, "mlx5_0", state="1: DOWN", rate="10 Gb/sec (4X SDR)", link_layer="Ethernet")
    (nic,) = sysfs.read().nics
    assert nic.ports == (Port(1, "Ethernet", "DOWN", 10_000_000_000),)
    assert (nic.active, nic.bits_per_second) == (False, 0)


def test_active_ports_add_up(sysfs: SysfsBuilder) -> None:
    nic = sysfs.nic(sysfs.pci_device(f"{SWITCH}/0000:17:00.0"), "mlx5_0", **UP)
    for port, state in (("2", "4: ACTIVE"), ("10", "2: INIT")):
        sysfs.write({f"{nic}/ports/{port}/{name}": text for name, text in UP.items()})
        sysfs.write({f"{nic}/ports/{port}/state": state})
    (found,) = sysfs.read().nics
    assert [port.number for port in found.ports] == [1, 2, 10]
    assert found.bits_per_second == 800_000_000_000


@pytest.mark.parametrize(
    ("rate", "bits"),
    [
        ("2.5 Gb/sec (1X SDR)", 2_500_000_000),
        ("100 Gb/sec (4X EDR)", 100_000_000_000),
        ("unknown", 0),
    ],
)
def test_rates_are_bits_per_second(sysfs: SysfsBuilder, rate: str, bits: int) -> None:
    sysfs.nic(sysfs.pci_device("pci0000:00/0000:00:05.0"), "efa_0", **{**UP, "rate": rate})
    assert sysfs.read().nics[0].bits_per_second == bits


def test_a_nic_with_hardly_any_files_is_listed_and_inactive(sysfs: SysfsBuilder) -> None:
    sysfs.link("class/infiniband/mlx5_0", "../../devices/pci0000:00/0000:00:05.0/infiniband/mlx5_0")
    sysfs.write({"class/infiniband/mlx5_1/ports/1/cap_mask": "0x0"})
    sysfs.link("class/infiniband/mlx5_1/device", "../../../0000:00:06.0")
    dangling, bare = sysfs.read().nics
    assert dangling == Nic("mlx5_0", None, None, (), Location((), 0))
    assert bare == Nic("mlx5_1", None, None, (Port(1, "unknown", "unknown", 0),), Location((), 0))


def test_soft_roce_is_on_no_bus_and_says_its_interface(sysfs: SysfsBuilder) -> None:
    sysfs.write(
        {
            "devices/virtual/infiniband/rxe0/ports/1/state": "4: ACTIVE",
            "devices/virtual/infiniband/rxe0/ports/1/rate": "2.5 Gb/sec (1X SDR)",
            "devices/virtual/infiniband/rxe0/ports/1/link_layer": "Ethernet",
            "devices/virtual/infiniband/rxe0/parent": "eth0",
        }
    )
    sysfs.link("class/infiniband/rxe0", "../../devices/virtual/infiniband/rxe0")
    (nic,) = sysfs.read().nics
    assert (nic.active, nic.driver, nic.netdev, nic.fabric) == (True, None, "eth0", "verbs")
    assert nic.location.pci_address is None


def test_the_interface_of_a_port_is_preferred_over_representors(sysfs: SysfsBuilder) -> None:
    device = sysfs.pci_device("pci0000:00/0000:00:05.0")
    nic = sysfs.nic(device, "mlx5_0", **UP)
    for name in ("eth_rep0", "p0"):
        sysfs.write({f"{device}/net/{name}/operstate": "up"})
    assert sysfs.read().nics[0].netdev == "eth_rep0"
    sysfs.write({f"{nic}/ports/1/gid_attrs/ndevs/0": "p0"})
    assert sysfs.read().nics[0].netdev == "p0"


def test_a_subfunction_sits_where_its_pci_device_does(sysfs: SysfsBuilder) -> None:
    device = sysfs.pci_device(f"{SWITCH}/0000:17:00.0")
    sysfs.nic(f"{device}/mlx5_core.sf.4", "mlx5_2", **UP)
    assert sysfs.read().nics[0].location.pci_path == (*SWITCH.split("/"), "0000:17:00.0")


@pytest.mark.parametrize(
    ("name", "driver", "fabric"),
    [
        ("rdmap85s0", "efa", "ofi"),
        ("efa_0", "efa", "ofi"),
        ("efa_0", None, "ofi"),
        ("rdmap85s0", None, "ofi"),
        ("mlx5_0", "mlx5_core", "verbs"),
        ("rdmap5s0", "irdma", "verbs"),
        ("mlx5_0", None, "verbs"),
    ],
)
def test_efa_is_for_ofi_and_everything_else_for_verbs(
    name: str, driver: str | None, fabric: str
) -> None:
    assert Nic(name, driver, None, (), Location()).fabric == fabric


# --- NUMA ------------------------------------------------------------------------------------


@pytest.mark.parametrize("numa_node", ["-1", "7", "", "none"])
def test_an_invalid_numa_node_is_unknown(sysfs: SysfsBuilder, numa_node: str) -> None:
    for node in "01":
        sysfs.write({f"devices/system/node/node{node}/cpulist": node})
    device = {**GPU, "numa_node": numa_node, "local_cpulist": "0-1"}
    sysfs.pci_device("pci0000:00/0000:00:02.0", **device)
    (gpu,) = sysfs.read().gpus
    assert (gpu.location.numa_node, gpu.location.cpus) == (None, (0, 1))


def test_on_a_host_with_one_numa_node_everything_is_on_that_one(sysfs: SysfsBuilder) -> None:
    sysfs.write({"devices/system/node/node0/cpulist": "0-3"})
    sysfs.pci_device("pci0000:00/0000:00:02.0", **GPU, numa_node="-1")
    place = Location(("pci0000:00", "0000:00:02.0"), 0, (0, 1, 2, 3))
    assert sysfs.read().gpus == (Gpu(0, "nvidia", place),)


def test_a_kernel_without_numa_is_one_node(sysfs: SysfsBuilder) -> None:
    sysfs.write({"devices/system/cpu/online": "0-1"})
    assert sysfs.read() == Topology((NumaNode(0, (0, 1)),), (), ())


def test_numa_nodes_may_have_gaps_and_no_cpus(sysfs: SysfsBuilder) -> None:
    for number, cpus in (("10", ""), ("2", "4-5")):
        sysfs.write({f"devices/system/node/node{number}/cpulist": cpus})
    sysfs.write({"devices/system/node/possible": "0-10"})
    assert sysfs.read().numa_nodes == (NumaNode(2, (4, 5)), NumaNode(10, ()))


def test_an_empty_tree_is_one_node_without_anything(tmp_path: Path) -> None:
    assert read_topology(Sysfs(tmp_path)) == Topology((NumaNode(0, ()),), (), ())


# --- routes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defaults", "interface"),
    [({}, None), ({"eth0": 0}, "eth0"), ({"eth0": 200, "eth1": 100, "eth2": 300}, "eth1")],
)
def test_the_default_route_has_the_least_metric(
    sysfs: SysfsBuilder, defaults: dict[str, int], interface: str | None
) -> None:
    sysfs.routes(defaults)
    assert sysfs.read().default_route == interface


def test_routes_beside_a_folder_not_named_sys_are_ignored(tmp_path: Path) -> None:
    builder = SysfsBuilder(tmp_path / "copy")
    builder.routes({"eth0": 0})
    assert builder.read().default_route is None


@pytest.mark.parametrize("text", ["", "Iface", "eth0 00000000 x", "e 00000000 0 3 0 0 no 00000000"])
def test_routes_that_cannot_be_read_are_none(sysfs: SysfsBuilder, text: str) -> None:
    sysfs.write({"../proc/net/route": text})
    assert sysfs.read().default_route is None
