import os
from pathlib import Path

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.topology import Sysfs, read_topology
from kvxfer.topology.cpu_list import format_cpu_list, parse_cpu_list
from tests.topology import machines
from tests.topology.sysfs_builder import SysfsBuilder


def test_a_recorded_tree_is_a_root_or_a_sys_folder_of_any_name(tmp_path: Path) -> None:
    dgx = machines.write("dgx", tmp_path)
    renamed = tmp_path / "from-node-17"
    renamed.symlink_to(dgx / "sys")
    found = [Sysfs.recorded(folder) for folder in (dgx, dgx / "sys", renamed)]
    assert len({read_topology(each) for each in found}) == 1
    assert len(read_topology(found[0]).gpus) == 8


def test_a_relative_folder_is_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dgx = machines.write("dgx", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert read_topology(Sysfs.recorded(Path("dgx"))) == read_topology(Sysfs(dgx / "sys"))


@pytest.mark.parametrize("folder", ["missing", "file", "empty"])
def test_a_folder_without_a_sysfs_is_refused_by_name(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=f"{folder} holds no sysfs: give a folder"):
        Sysfs.recorded(tmp_path / folder)


def test_missing_files_and_loops_of_links_read_as_nothing(tmp_path: Path) -> None:
    sysfs = SysfsBuilder(tmp_path / "sys")
    sysfs.link("bus/pci/devices/0000:00:01.0", "0000:00:01.0")
    tree = Sysfs(sysfs.folder)
    assert tree.text("class/infiniband/mlx5_0/ports/1/state") is None
    assert tree.names("class/infiniband") == []
    assert tree.link_name("class/infiniband/mlx5_0/device/driver") is None
    assert tree.device_path("bus/pci/devices/0000:00:01.0") is None


def test_the_machines_hold_relative_links_only(tmp_path: Path) -> None:
    for name in machines.MACHINES:
        machines.write(name, tmp_path)
    links = [path for path in tmp_path.rglob("*") if path.is_symlink()]
    assert len(links) > 100
    assert [link for link in links if link.readlink().is_absolute()] == []
    # All links end in the tree, except those of drivers: only their names are read.
    lost = [link for link in links if not link.exists() and link.name != "driver"]
    assert lost == []
    assert all(Path(os.path.normpath(link.parent / link.readlink())) > tmp_path for link in links)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("0", (0,)),
        ("0-1,96-97", (0, 1, 96, 97)),
        ("", ()),
    ],
)
def test_the_kernel_writes_cpus_as_runs(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus
    assert format_cpu_list(cpus) == text


@pytest.mark.parametrize("text", ["\n", "-1", "ffff,ffff", "1-2-3", "all"])
def test_an_invalid_list_of_cpus_is_empty(text: str) -> None:
    assert parse_cpu_list(text) == ()


def test_cpus_are_sorted_and_counted_once() -> None:
    assert parse_cpu_list("4,0-1,1") == (0, 1, 4)
    assert format_cpu_list([3, 1, 2]) == "1-3"
