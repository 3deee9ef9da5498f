import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from resource import RLIM_INFINITY
from types import ModuleType

import httpx2
import pytest

from kvxfer.doctor import clocks, devices, fabrics, limits, nic_fabrics, python_packages, settings
from kvxfer.doctor.examination import core_works, examine
from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host
from tests.topology import machines
from tests.virtual_time import VirtualClock

THP = "sys/kernel/mm/transparent_hugepage"


def host(tmp_path: Path, files: dict[str, str] | None = None, **environment: str) -> Host:
    """A host whose /proc, /sys and libraries are these files."""
    for name, text in (files or {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return Host(tmp_path, environment)


def refuse() -> None:
    raise PermissionError(1, "Operation not permitted")


def permit() -> None:
    pass


# --- the whole -------------------------------------------------------------------------------


@pytest.mark.native
def test_every_area_is_examined_on_this_host() -> None:
    probed = {Area.HARDWARE, Area.LOOPBACK}
    assert {finding.area for finding in examine(Host())} == set(Area) - probed


def test_each_limit_of_a_host_comes_with_a_remedy(tmp_path: Path) -> None:
    poor = host(
        tmp_path,
        {
            "proc/sys/kernel/yama/ptrace_scope": "3",
            f"{THP}/enabled": "always madvise [never]",
            f"{THP}/shmem_enabled": "always within_size advise [never] deny force",
            "proc/sys/net/ipv4/tcp_rmem": "4096 131072 212992",
            "proc/sys/net/ipv4/tcp_wmem": "4096 16384 212992",
        },
    )
    findings = [
        fabrics.local_shared(refuse),
        fabrics.local_cma(poor, refuse),
        fabrics.local_cma(poor, permit),
        fabrics.pidfd(refuse),
        limits.huge_pages(poor),
        limits.shared_huge_pages(poor),
        *limits.socket_buffers(poor),
        limits.open_files((1024, 4096)),
        limits.cores(1),
        *devices.nics(poor),
    ]
    assert [finding.status for finding in findings] == [Status.LIMITED] * len(findings)
    assert [finding.name for finding in findings if not finding.remedy] == []


def test_only_what_the_core_needs_can_be_broken() -> None:
    broken = [python_packages.native_module("kvxfer._no_such_module"), fabrics.tcp(refuse)]
    assert [finding.status for finding in broken] == [Status.BROKEN] * 2
    assert all(finding.remedy for finding in broken)
    assert not core_works(broken)
    assert core_works([fabrics.local_shared(refuse), limits.cores(1)])


# --- fabrics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "status"),
    [(None, Status.OK), ("0", Status.OK), ("1", Status.OK), ("2", Status.LIMITED)],
)
def test_yama_decides_whether_registered_memory_is_readable(
    tmp_path: Path, scope: str | None, status: Status
) -> None:
    files = {} if scope is None else {"proc/sys/kernel/yama/ptrace_scope": scope}
    assert fabrics.local_cma(host(tmp_path, files), permit).status is status


@pytest.mark.native
def test_reading_memory_is_really_tried() -> None:
    assert fabrics.local_cma(Host()).status in (Status.OK, Status.LIMITED)


def test_libraries_are_looked_for_in_ld_library_path_first(tmp_path: Path) -> None:
    here = host(
        tmp_path,
        {"mine/libfabric.so.1": "", "usr/lib/libfabric.so.1": ""},
        LD_LIBRARY_PATH=f":{tmp_path / 'mine'}",
    )
    assert here.library("libfabric.so.1") == tmp_path / "mine/libfabric.so.1"


def test_namespaces_are_named_so_that_two_processes_can_be_compared(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    assert "pid:[4026531836] user:unknown" in fabrics.namespaces(host(tmp_path)).detail


# --- fabrics with a NIC ----------------------------------------------------------------------

BUILT = ("local", "tcp", "verbs", "ofi")
UNLIMITED = (RLIM_INFINITY, RLIM_INFINITY)
LIBRARIES = {"usr/lib64/libibverbs.so.1": "", "opt/amazon/efa/lib/libfabric.so.1": ""}
IPC_LOCK = "CapInh:\t0000000000000000\nCapEff:\t0000000000004000"


def rdma_host(tmp_path: Path, files: dict[str, str] | None = None, **states: str) -> Host:
    """Returns a host with RDMA devices, a port state for each name, and a device file for each."""
    found = dict(files or {})
    for number, (name, state) in enumerate(states.items()):
        port = f"sys/class/infiniband/{name}/ports/1"
        found[f"{port}/link_layer"] = "InfiniBand"
        found[f"{port}/state"] = state
        found[f"{port}/rate"] = "400 Gb/sec (4X NDR)"
        found[f"sys/class/infiniband_verbs/uverbs{number}/ibdev"] = name
        found[f"dev/infiniband/uverbs{number}"] = ""
    return host(tmp_path, found)


@pytest.mark.parametrize(
    ("check", "device", "says"),
    [
        (nic_fabrics.verbs, "mlx5_0", "libibverbs.so.1 is at {}/usr/lib64/libibverbs.so.1"),
        (nic_fabrics.ofi, "rdmap85s0", "libfabric.so.1 is at {}/opt/amazon/efa/lib/libfabric.so.1"),
    ],
)
def test_a_fabric_with_all_it_needs_is_ok(
    tmp_path: Path, check: Callable[..., Finding], device: str, says: str
) -> None:
    nics = rdma_host(tmp_path, LIBRARIES, **{device: "4: ACTIVE"})
    found = check(nics, BUILT, UNLIMITED, lambda file: True)
    assert (found.status, found.remedy) == (Status.OK, None)
    assert found.detail.startswith(says.format(tmp_path))
    assert found.detail.endswith(": 1")


def test_each_fabric_counts_its_own_devices_only(tmp_path: Path) -> None:
    nics = rdma_host(tmp_path, LIBRARIES, mlx5_0="4: ACTIVE")
    assert nic_fabrics.verbs(nics, BUILT, UNLIMITED).status is Status.OK
    efa = nic_fabrics.ofi(nics, BUILT, UNLIMITED)
    assert (efa.status, efa.remedy) == (Status.ABSENT, None)
    assert efa.detail.endswith("; EFA devices: none")


def test_a_fabric_that_is_not_built_is_absent_and_has_a_remedy_if_there_are_devices(
    tmp_path: Path,
) -> None:
    nics = rdma_host(tmp_path, LIBRARIES, mlx5_0="4: ACTIVE")
    verbs, ofi = (check(nics, ("local", "tcp")) for check in (nic_fabrics.verbs, nic_fabrics.ofi))
    assert verbs.status is ofi.status is Status.ABSENT
    assert verbs.detail.startswith("not built into the native engine; libibverbs.so.1 is at ")
    assert verbs.remedy is not None
    assert "libibverbs-dev" in verbs.remedy
    assert ofi.remedy is None


@pytest.mark.parametrize(
    ("states", "files", "locked", "openable", "says", "remedy"),
    [
        (["4: ACTIVE"], {}, UNLIMITED, True, "libibverbs.so.1 is not installed", "apt-get install"),
        (["1: DOWN"] * 2, LIBRARIES, UNLIMITED, True, "none of them with an active port", "a port"),
        (["4: ACTIVE"], LIBRARIES, UNLIMITED, False, "uverbs* of none can be opened", "--device"),
        (["4: ACTIVE"], LIBRARIES, (8 << 20, 8 << 20), True, "only 8192 KiB", "ulimit -l"),
    ],
)
def test_a_fabric_with_devices_that_lacks_something_is_limited_and_has_a_remedy(
    tmp_path: Path,
    states: list[str],
    files: dict[str, str],
    locked: tuple[int, int],
    openable: bool,
    says: str,
    remedy: str,
) -> None:
    named = {f"mlx5_{number}": state for number, state in enumerate(states)}
    nics = rdma_host(tmp_path, files, **named)
    found = nic_fabrics.verbs(nics, BUILT, locked, lambda file: openable)
    assert found.status is Status.LIMITED
    assert says in found.detail
    assert found.remedy is not None
    assert remedy in found.remedy
    assert "; " not in found.remedy  # nothing else is wrong


def test_one_usable_nic_is_enough(tmp_path: Path) -> None:
    nics = rdma_host(tmp_path, LIBRARIES, mlx5_0="1: DOWN", mlx5_1="4: ACTIVE")
    found = nic_fabrics.verbs(nics, BUILT, UNLIMITED, lambda file: file.name == "uverbs1")
    assert found.status is Status.OK
    assert found.detail.endswith(
        "1 of them with an active port; /dev/infiniband/uverbs* of 1 can be opened"
    )


def test_device_files_are_really_opened_and_the_module_may_be_missing(tmp_path: Path) -> None:
    nics = rdma_host(tmp_path, LIBRARIES, mlx5_0="4: ACTIVE")
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    assert "--device" in (nic_fabrics.verbs(nics, BUILT, UNLIMITED).remedy or "")
    (tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev").unlink()
    assert nic_fabrics.verbs(nics, BUILT, UNLIMITED).remedy == "modprobe ib_uverbs"


def test_the_native_module_says_what_it_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvxfer._made_up")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert nic_fabrics.built_fabrics(module.__name__) == ("local", "tcp")
    monkeypatch.setattr(module, "BUILT_FABRICS", BUILT, raising=False)
    assert nic_fabrics.built_fabrics(module.__name__) == BUILT
    assert nic_fabrics.built_fabrics("kvxfer._no_such_module") == ()


@pytest.mark.parametrize(
    ("locked", "status", "lockable"),
    [
        (UNLIMITED, "", None),
        ((65536, 65536), "", 65536),
        ((65536, RLIM_INFINITY), "CapEff:\t0000000000000000", 65536),
        ((65536, 65536), IPC_LOCK, None),
    ],
)
def test_locked_memory_is_bounded_by_the_soft_limit_unless_the_capability_lifts_it(
    tmp_path: Path, locked: tuple[int, int], status: str, lockable: int | None
) -> None:
    assert limits.lockable_memory(host(tmp_path, {"proc/self/status": status}), locked) == lockable


# --- devices ---------------------------------------------------------------------------------


def test_interfaces_are_listed_with_state_speed_and_mtu_but_not_the_loopback(
    tmp_path: Path,
) -> None:
    found = devices.nics(
        host(
            tmp_path,
            {
                "sys/class/net/lo/operstate": "unknown",
                "sys/class/net/eth0/operstate": "up",
                "sys/class/net/eth0/speed": "25000",
                "sys/class/net/eth0/mtu": "9000",
                "sys/class/net/eth1/operstate": "down",
                "sys/class/net/eth1/speed": "-1",
                "sys/class/net/eth1/mtu": "1500",
                "sys/class/net/bonding_masters": "",
            },
        )
    )
    assert [(finding.name, finding.detail) for finding in found] == [
        ("eth0", "up, 25 Gbit/s, MTU 9000"),
        ("eth1", "down, MTU 1500"),
    ]


def test_rdma_devices_are_listed_with_their_ports_and_fabric(tmp_path: Path) -> None:
    nics = rdma_host(tmp_path, mlx5_0="4: ACTIVE", efa_0="1: DOWN")
    assert [
        (finding.name, finding.status, finding.detail) for finding in devices.rdma_nics(nics)
    ] == [
        ("efa_0", Status.INFO, "port 1: InfiniBand, DOWN, 400 Gbit/s; for ofi"),
        ("mlx5_0", Status.INFO, "port 1: InfiniBand, ACTIVE, 400 Gbit/s; for verbs"),
    ]


def test_rdma_devices_that_no_rank_uses_by_itself_say_why(tmp_path: Path) -> None:
    found = devices.rdma_nics(Host(machines.write("server", tmp_path), {}))
    said = [finding.detail.partition("; used only if nics names it: ")[2] for finding in found]
    assert said[0] == said[3] == ""
    assert said[1] == "ens2np0 has the host's default route"
    assert said[2].startswith("its 25 Gbit/s are less than a quarter")


def test_a_host_without_rdma_devices_is_reported(tmp_path: Path) -> None:
    (found,) = devices.rdma_nics(host(tmp_path))
    assert (found.status, found.detail) == (Status.ABSENT, "no RDMA NIC")


def no_smi() -> list[str]:
    raise FileNotFoundError(2, "No such file or directory", "nvidia-smi")


def no_cuda() -> int:
    raise OSError("libcuda.so.1: cannot open shared object file")


def test_gpus_are_listed_by_nvidia_smi() -> None:
    lines = ["NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15", "NVIDIA L4, 23034 MiB, 570.86.15"]
    found = devices.gpus(lambda: lines, no_cuda)
    assert [finding.name for finding in found] == ["GPU 0", "GPU 1"]
    assert found[0].detail.startswith("NVIDIA H100 80GB HBM3, 81559 MiB, driver 570.86.15;")


@pytest.mark.parametrize(
    ("count", "status", "says"),
    [(lambda: 2, Status.INFO, "2 found by libcuda"), (lambda: 0, Status.ABSENT, "finds none")],
)
def test_gpus_without_nvidia_smi_are_counted_by_libcuda(
    count: object, status: Status, says: str
) -> None:
    (found,) = devices.gpus(no_smi, count)  # type: ignore[arg-type]
    assert (found.status, says in found.detail) == (status, True)


def test_a_host_without_gpus_is_reported() -> None:
    (found,) = devices.gpus(no_smi, no_cuda)
    assert found.status is Status.ABSENT
    assert "neither nvidia-smi nor libcuda" in found.detail


# --- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enabled", "status"),
    [
        ("[always] madvise never", Status.OK),
        ("always [madvise] never", Status.OK),
        ("always madvise [never]", Status.LIMITED),
        (None, Status.LIMITED),
    ],
)
def test_huge_pages_of_registered_memory(
    tmp_path: Path, enabled: str | None, status: Status
) -> None:
    files = {} if enabled is None else {f"{THP}/enabled": enabled}
    assert limits.huge_pages(host(tmp_path, files)).status is status


@pytest.mark.parametrize(
    ("setting", "release", "status"),
    [
        ("never [advise]", "5.4.0", Status.OK),
        ("advise [never] deny", "6.1.0-18-amd64", Status.OK),
        ("advise [never] deny", "6.0.9", Status.LIMITED),
        ("advise never [deny]", "6.12.1", Status.LIMITED),
        (None, "6.12.1", Status.LIMITED),
    ],
)
def test_huge_pages_of_shared_memory_depend_on_the_kernel_and_its_setting(
    tmp_path: Path, setting: str | None, release: str, status: Status
) -> None:
    files = {"proc/sys/kernel/osrelease": release}
    if setting is not None:
        files[f"{THP}/shmem_enabled"] = setting
    assert limits.shared_huge_pages(host(tmp_path, files)).status is status


@pytest.mark.parametrize(
    ("largest", "status"), [(4 << 20, Status.OK), ((4 << 20) - 1, Status.LIMITED)]
)
def test_socket_buffers_are_judged_by_their_largest_size(
    tmp_path: Path, largest: int, status: Status
) -> None:
    files = {f"proc/sys/net/ipv4/{name}": f"4096\t131072\t{largest}" for name in ("tcp_rmem",)}
    receive, send = limits.socket_buffers(host(tmp_path, files))
    assert receive.status is status
    assert (send.status, send.detail) == (Status.INFO, "tcp_wmem cannot be read")


@pytest.mark.parametrize(
    ("soft", "status"), [(RLIM_INFINITY, Status.OK), (4096, Status.OK), (4095, Status.LIMITED)]
)
def test_open_files_bound_the_peers(soft: int, status: Status) -> None:
    assert limits.open_files((soft, RLIM_INFINITY)).status is status


def test_locked_memory_is_reported_and_not_judged() -> None:
    assert limits.locked_memory((8 << 20, 8 << 20)).detail.startswith("8192 KiB")
    assert limits.locked_memory((RLIM_INFINITY, RLIM_INFINITY)).detail.startswith("unlimited")


def test_memory_is_reported_with_the_bound_of_the_control_group(tmp_path: Path) -> None:
    meminfo = "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB"
    bounded = host(tmp_path, {"proc/meminfo": meminfo, "sys/fs/cgroup/memory.max": str(2 << 30)})
    assert limits.memory(bounded).detail == (
        "8.0 GiB, 4.0 GiB available, control group allows 2.0 GiB"
    )
    unbounded = host(tmp_path, {"sys/fs/cgroup/memory.max": "max"})
    assert limits.memory(unbounded).detail == "8.0 GiB, 4.0 GiB available"


# --- Python and settings ---------------------------------------------------------------------


def test_an_extra_that_is_not_installed_comes_with_its_pip_command() -> None:
    def installed(package: str) -> str:
        if package == "torch":
            raise PackageNotFoundError(package)
        return "1.0"

    found: dict[str, Finding] = {
        finding.name: finding for finding in python_packages.extras(installed)
    }
    assert found["kvxfer[torch]"].status is Status.ABSENT
    assert found["kvxfer[torch]"].detail.startswith("torch missing")
    assert found["kvxfer[torch]"].remedy == "pip install 'kvxfer[torch]'"
    assert found["kvxfer[server]"].status is Status.OK
    assert "fastapi 1.0" in found["kvxfer[server]"].detail


def test_the_cluster_key_is_never_shown(tmp_path: Path) -> None:
    key, control_plane = settings.variables(host(tmp_path, KVXFER_CLUSTER_KEY="hush" * 8))
    assert (key.status, key.detail, key.remedy) == (Status.OK, "set", None)
    assert control_plane.status is Status.INFO
    assert control_plane.remedy is not None


@pytest.mark.parametrize(
    ("wrong", "status", "said"),
    [
        (0, Status.OK, "as the control plane's"),
        (4, Status.OK, "as the control plane's"),
        (90, Status.LIMITED, "89 s ahead of the control plane's"),
        (-90, Status.LIMITED, "90 s behind the control plane's"),
    ],
)
def test_a_clock_that_differs_from_the_control_planes(
    tmp_path: Path, wrong: float, status: Status, said: str
) -> None:
    date = {"Date": "Sun, 29 Nov 2026 12:00:00 GMT"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=date))
    here = VirtualClock(1795953600.0 + wrong)
    named = host(tmp_path, KVXFER_CONTROL_PLANE="http://[fd00::1]:8080/")
    [found] = clocks.clock(named, transport=transport, clock=here)
    assert (found.status, said in found.detail) == (status, True), found
    assert (found.remedy is None) == (status is Status.OK)


def test_a_control_plane_without_a_date_is_not_a_failure(tmp_path: Path) -> None:
    assert clocks.clock(host(tmp_path)) == []
    for url in ("http://fd00::1:8080", "http://127.0.0.1:1"):
        [found] = clocks.clock(
            host(tmp_path, KVXFER_CONTROL_PLANE=url),
            transport=httpx2.MockTransport(lambda _: httpx2.Response(200)),
        )
        assert (found.status, "KVXFER_CONTROL_PLANE" in str(found.remedy)) == (Status.INFO, True)


@pytest.mark.parametrize(
    ("release", "setting", "status"),
    [
        ("6.1.0-18-amd64", "always [never] deny", Status.OK),
        ("5.15.0", "always [never] deny", Status.LIMITED),
        ("5.15.0", "[advise] never deny", Status.OK),
        ("6.18.44", "never [deny]", Status.LIMITED),
    ],
)
def test_huge_pages_of_shared_memory(
    tmp_path: Path, release: str, setting: str, status: Status
) -> None:
    files = {"proc/sys/kernel/osrelease": release, f"{THP}/shmem_enabled": setting}
    assert limits.shared_huge_pages(host(tmp_path, files)).status is status
