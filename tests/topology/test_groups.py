from dataclasses import replace

import pytest

from kvxfer.topology import (
    Distance,
    DomainGroup,
    Nic,
    domain_groups,
    host_groups,
    left_out,
)
from kvxfer.topology.cpu_list import format_cpu_list
from kvxfer.topology.groups import spare_nics
from tests.topology.hosts import nic, place, recorded, topology

GBIT = 1_000_000_000


def switch(number: int, port: int, root: int | None = None) -> str:
    """Returns the path of a device behind a port of PCIe switch `number`, on host bridge `root`."""
    bridge = f"{0x10 + (number if root is None else root):02x}"
    ports = f"0000:{bridge}:{number:02x}.0/0000:{0x40 + number:02x}:00.0/0000:60:{port:02x}.0"
    return f"pci0000:{bridge}/{ports}/0000:{0x80 + 8 * number + port:02x}:00.0"


def names(groups: tuple[DomainGroup, ...]) -> list[list[str]]:
    return [[each.name for each in group.nics] for group in groups]


# --- the machines ----------------------------------------------------------------------------


def test_p5en_gives_each_gpu_the_two_efa_devices_of_its_switch() -> None:
    groups = domain_groups(recorded("p5en"))
    assert names(groups) == [
        ["rdmap85s0", "rdmap86s0"],
        ["rdmap87s0", "rdmap88s0"],
        ["rdmap110s0", "rdmap111s0"],
        ["rdmap112s0", "rdmap113s0"],
        ["rdmap135s0", "rdmap136s0"],
        ["rdmap137s0", "rdmap138s0"],
        ["rdmap160s0", "rdmap161s0"],
        ["rdmap162s0", "rdmap163s0"],
    ]
    assert [group.gpu and group.gpu.index for group in groups] == list(range(8))
    assert {group.distances for group in groups} == {(Distance.PIX, Distance.PIX)}
    assert {group.bits_per_second for group in groups} == {400 * GBIT}
    assert [(group.numa_node, format_cpu_list(group.cpus)) for group in groups] == [
        (0, "0-47,96-143")
    ] * 4 + [(1, "48-95,144-191")] * 4


def test_dgx_gives_each_gpu_the_connectx_of_its_switch() -> None:
    groups = domain_groups(recorded("dgx"))
    assert names(groups) == [[f"mlx5_{index}"] for index in range(8)]
    assert [group.gpu and group.gpu.index for group in groups] == list(range(8))
    assert {group.distances for group in groups} == {(Distance.PIX,)}
    assert {group.bits_per_second for group in groups} == {400 * GBIT}
    assert [(group.numa_node, format_cpu_list(group.cpus)) for group in groups] == [
        (0, "0-55,112-167")
    ] * 4 + [(1, "56-111,168-223")] * 4


def test_a_laptop_is_one_group_without_nics() -> None:
    assert domain_groups(recorded("laptop")) == (DomainGroup(None, (), 0, tuple(range(16)), 0),)


# --- counts that do not match ----------------------------------------------------------------


def test_more_gpus_than_nics_share_the_nearest() -> None:
    # Like p4d: two GPUs and one NIC behind each switch.
    host = topology(
        [place(switch(gpu // 2, gpu % 2), gpu // 4) for gpu in range(8)],
        [nic(f"efa_{index}", switch(index, 2), index // 2) for index in range(4)],
    )
    groups = domain_groups(host)
    assert names(groups) == [[f"efa_{gpu // 2}"] for gpu in range(8)]
    assert {group.distances for group in groups} == {(Distance.PIX,)}
    assert spare_nics(host, groups) == ()


def test_equally_near_nics_are_shared_evenly() -> None:
    host = topology([place()] * 4, [nic("mlx5_0"), nic("mlx5_1"), nic("mlx5_2")])
    assert names(domain_groups(host)) == [["mlx5_0"], ["mlx5_1"], ["mlx5_2"], ["mlx5_0"]]


def test_gpus_with_a_nic_nearby_choose_before_those_without() -> None:
    nics = [nic("mlx5_0", switch(0, 2)), nic("mlx5_1", switch(1, 2))]
    gpus = [place(switch(7, 0), 1), place(switch(0, 0)), place(switch(0, 1))]
    assert names(domain_groups(topology(gpus, nics))) == [["mlx5_1"], ["mlx5_0"], ["mlx5_0"]]


def test_one_nic_serves_all_gpus_even_across_numa_nodes() -> None:
    host = topology([place(switch(0, 0), 0), place(switch(1, 0), 1)], [nic("mlx5_0", numa_node=0)])
    near, far = domain_groups(host)
    assert names((near, far)) == [["mlx5_0"], ["mlx5_0"]]
    assert far.distances == (Distance.SYS,)
    # The worker runs beside the NIC, not beside the GPU.
    assert (far.numa_node, far.cpus) == (0, (0, 1))


def test_every_nic_serves_one_gpu_even_if_all_are_on_one_side() -> None:
    gpus = [place(switch(0, 0), 0), place(switch(1, 0), 1)]
    host = topology(gpus, [nic(f"mlx5_{index}", switch(0, index + 1), 0) for index in range(4)])
    assert names(domain_groups(host)) == [["mlx5_0", "mlx5_1"], ["mlx5_2", "mlx5_3"]]


def test_a_gpu_does_not_take_the_nic_that_is_nearer_to_another() -> None:
    gpus = [place(switch(0, 0), 0), place(switch(1, 0), 0)]
    nics = [nic("mlx5_0", switch(1, 1), 0), nic("mlx5_1", switch(2, 1), 0)]
    assert names(domain_groups(topology(gpus, nics))) == [["mlx5_1"], ["mlx5_0"]]


def test_an_extra_nic_joins_a_group_if_it_is_as_near_as_the_others() -> None:
    gpus = [place(switch(0, 0)), place(switch(0, 1))]
    host = topology(gpus, [nic(f"mlx5_{index}", switch(0, 2 + index)) for index in range(3)])
    groups = domain_groups(host)
    assert names(groups) == [["mlx5_0", "mlx5_2"], ["mlx5_1"]]
    assert [group.bits_per_second for group in groups] == [800 * GBIT, 400 * GBIT]


def test_a_nic_further_away_than_those_of_the_groups_is_left_out() -> None:
    # Like DGX: compute NICs beside the GPUs, a storage NIC elsewhere on the node.
    gpus = [place(switch(0, 0)), place(switch(1, 0))]
    nics = [nic("storage", switch(2, 1)), nic("a", switch(0, 1)), nic("b", switch(1, 1))]
    host = topology(gpus, nics)
    groups = domain_groups(host)
    assert names(groups) == [["a"], ["b"]]
    assert [each.name for each in spare_nics(host, groups)] == ["storage"]


# --- missing or unknown parts ----------------------------------------------------------------


@pytest.mark.parametrize("state", ["DOWN", "INIT", "ARMED", "unknown"])
def test_a_nic_without_an_active_port_is_in_no_group(state: str) -> None:
    found = recorded("dgx")
    down = replace(
        found.nics[3], ports=tuple(replace(port, state=state) for port in found.nics[3].ports)
    )
    host = replace(found, nics=(*found.nics[:3], down, *found.nics[4:]))
    groups = domain_groups(host)
    # GPU 3 shares a NIC of its NUMA node; the other GPUs keep theirs.
    assert names(groups) == [[f"mlx5_{index}"] for index in (0, 1, 2, 0, 4, 5, 6, 7)]
    assert spare_nics(host, groups) == ()


def test_gpus_without_any_nic_have_groups_on_their_numa_nodes() -> None:
    groups = domain_groups(topology([place("", 1), place("", None)], []))
    assert names(groups) == [[], []]
    assert [(group.numa_node, group.cpus) for group in groups] == [
        (1, (2, 3)),
        (None, (0, 1, 2, 3)),
    ]


def test_without_gpus_each_numa_node_with_nics_is_a_group() -> None:
    nics = [nic("mlx5_0", "", 0), nic("mlx5_1", "", 2), nic("mlx5_2", "", 0)]
    groups = domain_groups(topology([], [*nics, nic("mlx5_3", "", 1, "DOWN")], numa_nodes=3))
    assert names(groups) == [["mlx5_0", "mlx5_2"], ["mlx5_1"]]
    assert [(group.gpu, group.numa_node, group.cpus) for group in groups] == [
        (None, 0, (0, 1)),
        (None, 2, (4, 5)),
    ]
    assert [group.bits_per_second for group in groups] == [800 * GBIT, 400 * GBIT]
    assert groups[0].distances == ()


def test_nics_on_an_unknown_numa_node_are_a_separate_group() -> None:
    groups = domain_groups(topology([], [nic("mlx5_0", "", None), nic("mlx5_1", "", 1)]))
    assert names(groups) == [["mlx5_1"], ["mlx5_0"]]
    assert (groups[1].numa_node, groups[1].cpus) == (None, (0, 1, 2, 3))


def test_host_memory_is_served_by_all_nics_of_a_numa_node() -> None:
    groups = host_groups(recorded("dgx"))
    assert names(groups) == [
        [f"mlx5_{index}" for index in range(4)],
        [f"mlx5_{index}" for index in range(4, 8)],
    ]
    assert [group.gpu for group in groups] == [None, None]


def test_a_host_of_two_numa_nodes_without_nics_is_one_group() -> None:
    assert domain_groups(topology([], [])) == (DomainGroup(None, (), None, (0, 1, 2, 3), 0),)


# --- NICs for other purposes -----------------------------------------------------------------


def linked(name: str, gbit: int, netdev: str | None = None) -> Nic:
    one = nic(name)
    return replace(one, netdev=netdev, ports=(replace(one.ports[0], bits_per_second=gbit * GBIT),))


SLOW = "its 25 Gbit/s are less than a quarter of the fastest NIC's 200"
ROUTE = "eth0 has the host's default route"


@pytest.mark.parametrize(
    ("nics", "route", "out"),
    [
        ([linked("a", 25)], None, {}),  # alone
        ([linked("a", 25), linked("b", 100)], None, {}),  # a quarter is enough
        ([linked("a", 25), linked("b", 200)], None, {"a": SLOW}),
        ([linked("a", 0), linked("b", 200)], None, {}),  # an unknown speed
        ([nic("a", state="DOWN"), linked("b", 25)], None, {"a": "no active port"}),
        ([linked("a", 200, "eth0"), linked("b", 200, "eth1")], "eth0", {"a": ROUTE}),
        ([linked("a", 100, "eth0"), linked("b", 200)], "eth0", {"a": ROUTE}),
        ([linked("a", 200, "eth0"), linked("b", 100, "eth1")], "eth0", {}),  # the fastest
        ([linked("a", 200, "eth0"), linked("b", 200, "eth0")], "eth0", {}),  # no other NIC
        ([linked("a", 200, "eth0")], "eth0", {}),
        ([linked("a", 200, "eth0"), linked("b", 200)], "eth1", {}),
        ([linked("a", 200), linked("b", 200)], None, {}),
        ([linked("a", 25, "eth0"), linked("b", 200)], "eth0", {"a": SLOW}),  # one reason
    ],
)
def test_slow_nics_and_those_of_management_are_in_no_group(
    nics: list[Nic], route: str | None, out: dict[str, str]
) -> None:
    host = replace(topology([place()], nics), default_route=route)
    assert left_out(host) == out
    for groups in (domain_groups(host), host_groups(host)):
        grouped = {name for group in names(groups) for name in group}
        assert grouped == {each.name for each in nics} - out.keys()


def test_a_server_keeps_its_compute_nics() -> None:
    host = recorded("server")
    assert left_out(host) == {"mlx5_1": "ens2np0 has the host's default route", "mlx5_2": SLOW}
    assert names(domain_groups(host)) == [["mlx5_0"], ["mlx5_3"]]
