"""Two training ranks over gloo, whose model is sharded by FSDP, push to one instance.

`python -m tests.weights.pushing_ranks FOLDER ADDRESS`. Each rank writes its results and errors to
the folder.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.fsdp import fully_shard

from kvxfer import weights
from kvxfer.errors import KvxferError
from tests.weights.sharded_ranks import PATIENCE

RANKS = 2


def run(folder: Path, address: str, rank: int) -> None:
    init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=PATIENCE
    )
    torch.manual_seed(1)
    model = nn.Linear(6, 4)
    fully_shard(model)

    def push(version: int) -> str:
        pushed = weights.push(model, version, receivers=[address], fabrics=["tcp"])
        return pushed.result(60).state

    told: dict[str, Any] = {}
    state_dict = model.state_dict
    if rank == 1:  # only this rank has something that cannot be sent
        model.state_dict = lambda **_: {"value": 3}  # type: ignore[method-assign, assignment]
    told["first"] = error_of(lambda: push(1))
    model.state_dict = state_dict  # type: ignore[method-assign]

    told["sent"] = [push(1)]
    model._apply(lambda each: each + 1)  # other memory, as after to()
    told["sent"].append(push(2))
    if rank == 1:
        model.half()
    told["changed"] = error_of(lambda: push(3))
    weights.forget(model)
    model.float()
    assert push(3) == "committed"
    told["weights"] = model.weight.full_tensor().tolist()  # type: ignore[operator]
    weights.forget(model)
    (folder / f"{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except KvxferError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path, address: str) -> int:
    import torch._dynamo  # noqa: F401

    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=run, args=(folder, address, rank)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return max(abs(each.exitcode or 0) for each in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
