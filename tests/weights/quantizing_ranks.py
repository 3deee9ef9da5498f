"""Four training ranks, over gloo, describe what they send of models that are sent quantised.

`python -m tests.weights.quantizing_ranks FOLDER`. For each case, each rank writes its holdings and
tensors to the folder, and rank 0 the whole unquantised parameters.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import nn
from torch.distributed import init_process_group, new_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.weights.quantize import (
    FP8_BLOCKS,
    FP8_CHANNELS,
    FP8_TENSOR,
    INT8_CHANNELS,
    Quantization,
)
from kvxfer.weights.torch_state import TrainingState, state_of
from tests.weights.sharded_ranks import PATIENCE, WORLD, Tensors, save, whole_of

FORMATS: Final[dict[str, Quantization]] = {
    "blocks": FP8_BLOCKS,
    "channels": FP8_CHANNELS,
    "tensor": FP8_TENSOR,
    "int8": INT8_CHANNELS,
}


class Mlp(nn.Module):
    """A model with shards of 75 and 50 rows, and for `few` none at the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(200, 300)
        self.down = nn.Linear(300, 200, bias=False)
        self.few = nn.Linear(200, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.few(self.down(torch.relu(self.up(x))))
        return y


def format_of(name: str, how: Quantization) -> Quantization | None:
    """Returns the format of a parameter of any case: none for biases."""
    return None if name.endswith("bias") else how


def _state(module: nn.Module, how: Quantization) -> TrainingState:
    return state_of(module, quantize=lambda name, _: format_of(name, how))


def _mlp() -> Mlp:
    torch.manual_seed(3)
    return Mlp().bfloat16()


def fsdp(how: Quantization) -> tuple[TrainingState, Tensors]:
    """FSDP, and a step of training before the staging."""
    module = _mlp()
    fully_shard(module)
    state = _state(module, how)
    with torch.no_grad():
        for each in module.parameters():
            each *= -3
    state.staged()
    return state, whole_of(module)


def two_meshes(how: Quantization) -> tuple[TrainingState, Tensors]:
    """FSDP over tensor parallelism: rows and columns are split."""
    module = _mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    return _state(module, how), whole_of(module)


def replicas(how: Quantization) -> tuple[TrainingState, Tensors]:
    module = _mlp()
    fully_shard(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    return _state(module, how), whole_of(module)


def names(how: Quantization) -> tuple[TrainingState, Tensors]:
    """Fused experts, a tensor that is not contiguous, a stage of a pipeline, and a tensor with two
    names."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(5)
    whole = {
        "experts": torch.randn(3, 150, 140),
        "turned.weight": torch.randn(140, 150).t(),
        "last_stage.weight": torch.randn(9, 9),
        "embed.weight": torch.randn(70, 30),
    }
    ours: Tensors = {
        "experts": distribute_tensor(whole["experts"].clone(), mesh, (Shard(1),)),
        "turned.weight": whole["turned.weight"],
        "embed.weight": distribute_tensor(whole["embed.weight"].clone(), mesh, (Shard(0),)),
    }
    ours["head.weight"] = ours["embed.weight"]
    whole["head.weight"] = whole["embed.weight"].clone()
    if rank == 3:
        ours["last_stage.weight"] = whole["last_stage.weight"]
    state = state_of(ours, quantize=lambda name, _: format_of(name, how))
    return state, {name: each.contiguous() for name, each in whole.items()}


def refusals() -> dict[str, str]:
    """Returns the error of each case. All ranks get the same error, though one has the fault."""
    rank = torch.distributed.get_rank()
    module = _mlp()
    fully_shard(module)
    state = _state(module, FP8_BLOCKS)
    found = {}
    for case, value in {"nan": float("nan"), "infinity": float("-inf")}.items():
        local = module.down.weight.to_local()  # type: ignore[operator]
        before = local.detach().clone()
        if rank == 2:
            with torch.no_grad():
                local[7, 9] = value
        found[case] = _told(state.staged)
        with torch.no_grad():
            local.copy_(before)
        state.staged()  # without the fault, the next staging succeeds
    storage = module.up.bias.to_local().untyped_storage()  # type: ignore[operator]
    nbytes = storage.nbytes()
    if rank == 1:
        storage.resize_(0)
    found["freed"] = _told(state.staged)
    storage.resize_(nbytes)
    halves = [new_group([0, 1]), new_group([2, 3])]
    half = halves[rank // 2]
    found["half"] = _told(
        lambda: state_of(module, quantize=lambda name, _: format_of(name, FP8_BLOCKS), group=half)
    )
    found["other half"] = ""
    if rank > 1:
        found["other half"] = _told(
            lambda: state_of({}, quantize=lambda *_: FP8_BLOCKS, group=halves[0])
        )
    sparse = {"a.bias": torch.eye(2).to_sparse() if rank == 2 else torch.eye(2)}
    found["sparse"] = _told(lambda: state_of(sparse, quantize=lambda *_: None))
    stages = {f"{rank}.bias": torch.ones(3)}
    found["vector"] = _told(lambda: state_of(stages, quantize=lambda *_: FP8_BLOCKS))
    wide = {f"{rank}.weight": torch.ones(3, 3, dtype=torch.uint8)}
    found["bytes"] = _told(lambda: state_of(wide, quantize=lambda *_: FP8_BLOCKS))
    mixed = FP8_BLOCKS if rank else FP8_TENSOR
    found["mixed"] = _told(lambda: state_of(module.down, quantize=lambda *_: mixed))
    return found


def _told(call: Callable[[], object]) -> str:
    try:
        call()
    except (InvalidArgument, WeightsMismatch) as error:
        return str(error)
    return ""


Case = Callable[[Quantization], tuple[TrainingState, Tensors]]
CASES: Final[tuple[Case, ...]] = (fsdp, two_meshes, replicas, names)


def run(folder: Path, rank: int) -> None:
    init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=PATIENCE,
    )
    reductions = _counted()
    for case in CASES:
        for label, how in FORMATS.items():
            state, whole = case(how)
            reductions.clear()
            state.staged()
            assert len(reductions) == 1, "one collective for all parameters"
            name = f"{case.__name__}-{label}"
            (folder / f"{name}-{rank}.json").write_bytes(msgspec.json.encode(state.holdings))
            save(state.tensors, folder / f"{name}-{rank}.safetensors")
            if rank == 0:
                save(whole, folder / f"{name}.safetensors")
    (folder / f"refusals-{rank}.json").write_text(json.dumps(refusals()))
    torch.distributed.destroy_process_group()


def _counted() -> list[int]:
    """Returns a list to which each later all_reduce adds its number of elements."""
    reductions: list[int] = []
    reduce = torch.distributed.all_reduce

    def counted(tensor: torch.Tensor, *args: object, **options: object) -> object:
        reductions.append(tensor.numel())
        return reduce(tensor, *args, **options)

    torch.distributed.all_reduce = counted
    return reductions


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
