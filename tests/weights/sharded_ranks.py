"""Four training ranks, over gloo, describe what they hold of several models.

`python -m tests.weights.sharded_ranks FOLDER`. For each case, each rank writes its holdings and
tensors to the folder, and rank 0 the whole parameters.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from kvxfer.errors import InvalidArgument
from kvxfer.weights.torch_state import TrainingState, state_of

WORLD: Final = 4
PATIENCE: Final = timedelta(seconds=60)

Tensors = dict[str, torch.Tensor]


class Mlp(nn.Module):
    """A model with dimensions that 2 or 4 do not divide, and one that is less than 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 3)
        self.out = nn.Linear(3, 7, bias=False)
        self.register_buffer("steps", torch.tensor(5, dtype=torch.uint8))
        self.register_buffer("forgotten", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.down(torch.relu(self.up(x))))
        return y


class Tied(nn.Module):
    """A model with two layers between an embedding and a head, which are the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 7)
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, Tensors]:
    """Makes a model, the same on all ranks. Returns it with the whole parameters."""
    torch.manual_seed(3)
    module = kind()
    return module, {name: each.detach().clone() for name, each in module.state_dict().items()}


def fsdp() -> tuple[TrainingState, Tensors]:
    """FSDP, and two steps of training after state_of(): its tensors have the new weights."""
    module, _ = made(Tied)
    for layer in module.layers:  # type: ignore[union-attr]
        fully_shard(layer)  # type: ignore[arg-type]
    fully_shard(module, reshard_after_forward=False)
    state = state_of(module)
    for _ in range(2):
        module(torch.arange(9)).square().sum().backward()
        with torch.no_grad():
            for each in module.parameters():
                each -= 0.5 * each.grad
        module.zero_grad()
    return state, whole_of(module)


def other_axis() -> tuple[TrainingState, Tensors]:
    """FSDP along another dimension than the first, after a forward has gathered the parameter."""
    module, whole = made(lambda: nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 8)))
    fully_shard(
        module,
        reshard_after_forward=False,
        shard_placement_fn=lambda each: Shard(1) if each.shape == (3, 8) else Shard(0),
    )
    module(torch.ones(2, 8))
    return state_of(module), whole


def two_meshes() -> tuple[TrainingState, Tensors]:
    """FSDP over tensor parallelism: strided shards."""
    module, whole = made(Mlp)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _over_tp(module, mesh)
    fully_shard(module, mesh=mesh["dp"])
    return state_of(module), whole


def replicas() -> tuple[TrainingState, Tensors]:
    module, whole = made(Mlp)
    fully_shard(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    return state_of(module), whole


def three_axes() -> tuple[TrainingState, Tensors]:
    module, whole = made(Mlp)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copy", "shard", "tp"))
    _over_tp(module, mesh)
    fully_shard(module, mesh=mesh["copy", "shard"])
    return state_of(module), whole


def _over_tp(module: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], plan)


def names() -> tuple[TrainingState, Tensors]:
    """Tensors by name: stages and experts, one that is not contiguous, other dtypes, other axes."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = {
        "both": torch.arange(30.0).view(5, 6),
        "one_axis": torch.arange(35.0).view(7, 5),
        "twice": torch.arange(22.0).view(11, 2),
        "turned": torch.arange(24.0).view(4, 6),
        "rounded": torch.arange(12.0).div(7).view(3, 4),
        "scale": torch.tensor(2.5),
        "plain": torch.arange(3, dtype=torch.int8),
    }
    ours: Tensors = {
        name: distribute_tensor(whole[name].clone(), mesh, placements)
        for name, placements in {
            "both": (Shard(0), Shard(1)),
            "one_axis": (Replicate(), Shard(1)),
            "twice": (Shard(0), Shard(0)),
            "rounded": (Shard(0), Replicate()),
            "scale": (Replicate(), Replicate()),
        }.items()
    }
    ours["turned"] = _turned(whole["turned"], mesh, rank)
    ours["plain"] = whole["plain"].clone()
    for expert in range(6):
        name = f"expert.{expert}"
        whole[name] = torch.full((2, 3), float(expert))
        if expert % WORLD == rank:
            ours[name] = whole[name].clone()
    stage = DeviceMesh("cpu", [2, 3])
    whole["last_stage"] = torch.arange(10.0)
    if rank >= 2:
        ours["last_stage"] = distribute_tensor(whole["last_stage"].clone(), stage, (Shard(0),))
    state = state_of(
        {f"model.{name}": each for name, each in ours.items()} | {"dropped": torch.zeros(2)},
        rename=lambda name: None if name == "dropped" else name.removeprefix("model."),
        sent_as=lambda name, dtype: "bfloat16" if name == "rounded" else dtype,
        host=f"host-{rank // 2}",
        nics=2,
    )
    assert state.copied == {"turned", "rounded"} & state.tensors.keys()
    for each in ours.values():  # training after state_of()
        (each.to_local() if isinstance(each, DTensor) else each).neg_()
    state.staged()
    whole["rounded"] = whole["rounded"].bfloat16()
    return state, {name: -each for name, each in whole.items()}


def _turned(whole: torch.Tensor, mesh: DeviceMesh, rank: int) -> DTensor:
    """Returns a shard whose memory is that of its transpose."""
    local = whole[:, rank // 2 * 3 :][:, :3].t().contiguous().t()
    assert not local.is_contiguous()
    return DTensor.from_local(local, mesh, (Shard(1), Replicate()))


def whole_of(module: nn.Module) -> Tensors:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in module.state_dict().items()
    }


def refusals() -> dict[str, str]:
    """Returns the errors that need several ranks."""
    flat = FullyShardedDataParallel(Mlp(), device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (WORLD,))
    short = DTensor.from_local(
        torch.zeros(2), mesh, (Shard(0),), shape=torch.Size((9,)), stride=(1,)
    )
    summand = DTensor.from_local(torch.zeros(2), mesh, [torch.distributed.tensor.Partial()])
    found = {}
    for case, parameters in {
        "flat": flat,
        "short": {"some.weight": short},
        "summand": {"some.weight": summand},
    }.items():
        try:
            state_of(parameters)  # type: ignore[arg-type]
        except InvalidArgument as error:
            found[case] = str(error)
    return found


CASES: Final[tuple[Callable[[], tuple[TrainingState, Tensors]], ...]] = (
    fsdp,
    other_axis,
    two_meshes,
    replicas,
    three_axes,
    names,
)


def run(folder: Path, rank: int) -> None:
    init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=PATIENCE,
    )
    for case in CASES:
        state, whole = case()
        (folder / f"{case.__name__}-{rank}.json").write_bytes(msgspec.json.encode(state.holdings))
        assert all(each.is_contiguous() for each in state.tensors.values())
        save(state.tensors, folder / f"{case.__name__}-{rank}.safetensors")
        if rank == 0:
            save(whole, folder / f"{case.__name__}.safetensors")
    (folder / f"refusals-{rank}.json").write_text(json.dumps(refusals()))
    torch.distributed.destroy_process_group()


def save(tensors: Mapping[str, Any], file: Path) -> None:
    save_file({name: each.detach().clone() for name, each in tensors.items()}, file)


def main(folder: Path) -> int:
    """Forks the ranks, so that torch is loaded once: fully_shard() loads its compiler, too."""
    import torch._dynamo  # noqa: F401

    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=run, args=(folder, rank)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
