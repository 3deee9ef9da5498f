from collections.abc import Collection
from pathlib import Path

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.topology import domain_groups, host_groups, local_group
from tests.topology import machines
from tests.topology.hosts import recorded


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
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, machine: str, gpu: int, there: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"there is no GPU {gpu}: .* shows {there}; "):
        local_group(gpu, machines.write(machine, tmp_path))


def test_a_host_without_sysfs_still_has_a_group(tmp_path: Path) -> None:
    assert local_group(root=tmp_path).nics == ()
    assert len(local_group().cpus) >= 1
