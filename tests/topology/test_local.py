from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.topology import (
    Topology,
    choose_nics,
    closed_nics,
    domain_groups,
    host_groups,
    local_group,
)
from tests.topology import machines
from tests.topology.hosts import nic, place, recorded, topology


@pytest.mark.parametrize("gpu", range(8))
def test_the_group_of_a_gpu(tmp_path: Path, gpu: int) -> None:
    group = local_group(gpu, machines.write("p5en", tmp_path))
    assert group == domain_groups(recorded("p5en"))[gpu]
    assert group.gpu is not None
    assert group.gpu.index == gpu


@pytest.mark.parametrize(
    ("cpus", "numa_node"), [({0}, 0), ({60, 61}, 1), (range(50, 64), 1), (range(224), 0), ((), 0)]
)
def test_host_memory_gets_the_numa_node_that_the_process_runs_on(
    tmp_path: Path, cpus: Collection[int], numa_node: int
) -> None:
    group = local_group(root=machines.write("dgx", tmp_path), running_on=cpus)
    assert group == host_groups(recorded("dgx"))[numa_node]


@pytest.mark.parametrize(
    ("machine", "gpu", "there"),
    [("dgx", 8, "GPUs 0 to 7"), ("dgx", -1, "GPUs 0 to 7"), ("laptop", 0, "none")],
)
def test_an_unknown_gpu_is_refused_with_those_that_exist(
    tmp_path: Path, machine: str, gpu: int, there: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"there is no GPU {gpu}: .* shows {there}; "):
        local_group(gpu, machines.write(machine, tmp_path))


def test_a_host_without_sysfs_still_has_a_group(tmp_path: Path) -> None:
    assert local_group(root=tmp_path).nics == ()
    assert len(local_group().cpus) >= 1


# --- the NICs of a rank ----------------------------------------------------------------------

GPUS = [gpu.location.pci_address for gpu in recorded("dgx").gpus]
ALL = [f"mlx5_{number}" for number in range(8)]
DOWN = topology([place()], [nic("mlx5_0", state="DOWN"), nic("mlx5_1", state="DOWN")])
PART = {f"rdmap{number}s0" for number in range(87, 164)}
"""All EFA devices of a p5en but the first two."""


def chosen(host: str | Topology, gpu: str | None = None, **asked: Any) -> list[str] | None:
    found = recorded(host) if isinstance(host, str) else host
    names = choose_nics(found, gpu, **{"running_on": found.cpus, **asked}).names
    return None if names is None else list(names)


@pytest.mark.parametrize("gpu", range(8))
def test_a_rank_gets_the_nics_of_its_gpu(gpu: int) -> None:
    assert chosen("dgx", GPUS[gpu]) == [f"mlx5_{gpu}"]
    group = domain_groups(recorded("p5en"))[gpu]
    assert group.gpu is not None
    assert chosen("p5en", group.gpu.location.pci_address) == [each.name for each in group.nics]


@pytest.mark.parametrize(
    ("host", "asked", "names"),
    [
        # Host memory: the NUMA nodes that the process may run on.
        ("dgx", {"running_on": {0}}, ALL[:4]),
        ("dgx", {"running_on": {60}}, ALL[4:]),
        ("dgx", {}, ALL),
        ("server", {}, ["mlx5_0", "mlx5_3"]),
        ("server", {"running_on": {40}}, ["mlx5_3"]),
        (topology([], [nic("mlx5_0", "", 1)]), {"running_on": {0}}, ["mlx5_0"]),
        # The operator excludes some: the GPU gets the next.
        ("dgx", {"gpu": GPUS[0], "exclude": ["mlx5_0"]}, ["mlx5_1"]),
        ("server", {"exclude": ["mlx5_0", "mlx5_3"]}, ["mlx5_1"]),
        ("server", {"exclude": ["mlx5_0", "mlx5_1", "mlx5_3"]}, ["mlx5_2"]),
        ("dgx", {"exclude": ["*"]}, []),
        (DOWN, {"exclude": ["mlx5_1"]}, ["mlx5_0"]),
        # All that the operator names, near or not.
        ("dgx", {"gpu": GPUS[0], "allow": ["mlx5_6", "mlx5_2"]}, ["mlx5_6", "mlx5_2"]),
        ("server", {"allow": ["mlx5_2"]}, ["mlx5_2"]),
        ("server", {"allow": ["*"]}, ALL[:4]),
        ("server", {"allow": ["mlx5_*"], "exclude": ["mlx5_2"]}, ["mlx5_0", "mlx5_1", "mlx5_3"]),
        ("server", {"allow": ["mlx5_3", "*"]}, ["mlx5_3", "mlx5_0", "mlx5_1", "mlx5_2"]),
        ("server", {"allow": ["mlx5_9"]}, ["mlx5_9"]),  # the engine refuses it
        # Only NICs that the container was given.
        ("dgx", {"gpu": GPUS[3], "closed": set(ALL[:7])}, ["mlx5_7"]),
        ("p5en", {"gpu": "0000:59:00.0", "closed": PART}, ["rdmap85s0", "rdmap86s0"]),
        ("dgx", {"gpu": GPUS[3], "closed": set(ALL)}, None),
        # A GPU that /sys does not show.
        ("server", {"gpu": "0001:00:00.0"}, ["mlx5_0", "mlx5_3"]),
        # Nothing to choose from.
        ("laptop", {}, None),
        ("laptop", {"exclude": ["mlx5_*"]}, None),
        ("laptop", {"allow": ["*"]}, None),
        ("dgx", {"fabrics": ["ofi"]}, None),
        ("dgx", {"fabrics": []}, None),
        (DOWN, {}, None),
    ],
)
def test_the_nics_of_a_rank(
    host: str | Topology, asked: dict[str, Any], names: list[str] | None
) -> None:
    assert chosen(host, **asked) == names


@pytest.mark.parametrize(
    ("allow", "exclude"), [(["rdmap*"], []), (["mlx5_0"], ["mlx5_*"]), (["*"], ["*"])]
)
def test_lists_that_leave_nothing_are_refused(allow: list[str], exclude: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=r"is none of the NICs of this host .* it has mlx5_0"):
        chosen("dgx", allow=allow, exclude=exclude)


def test_every_other_nic_has_its_reason() -> None:
    host = recorded("server")
    choice = choose_nics(host, "0000:98:00.0", running_on=())
    assert choice.names == ("mlx5_3",)
    assert str(choice) == (
        "NICs for GPU 1 (0000:98:00.0): mlx5_3; "
        "not mlx5_2 (its 25 Gbit/s are less than a quarter of the fastest NIC's 200); "
        "not mlx5_1 (ens2np0 has the host's default route); "
        "not mlx5_0 (not nearest to GPU 1 (0000:98:00.0))"
    )
    excluded = choose_nics(host, None, running_on={40}, exclude=["mlx5_0"], closed={"mlx5_1"})
    assert excluded.left_out == {
        "mlx5_0": "exclude_nics names it",
        "mlx5_1": "this process cannot open it",
        "mlx5_2": "its 25 Gbit/s are less than a quarter of the fastest NIC's 200",
    }
    assert excluded.near == "NUMA node 1"


def test_nics_whose_file_may_not_be_opened_are_closed(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / f"sys/class/infiniband_verbs/uverbs{number}"
        folder.mkdir(parents=True)
        (folder / "ibdev").write_text(f"mlx5_{number}\n")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs1").touch()
    assert closed_nics(tmp_path) == {"mlx5_0", "mlx5_2"}
    assert closed_nics(tmp_path / "no host") == frozenset()
