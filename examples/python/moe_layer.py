"""A layer of experts, spread over four processes, gives what one process computes.

Some tokens choose an expert twice. Rank 1 cannot begin one step, which then fails at all ranks with
its reason. Rank 3 is killed as it computes its part of a later step. Each expert is on two ranks,
so the others send the tokens of that step again, and nothing is lost.

    python examples/python/moe_layer.py
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kvxfer.errors import InvalidArgument, StepRefused
from kvxfer.moe import AllToAll, GroupedExperts, MoEAllToAll, MoeShape, Placement

RANKS, EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 4, 16, 128, 64, 4, 32
SHAPE = MoeShape(experts=EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens=TOKENS, input="float32")
PLACEMENT = Placement.even(EXPERTS, RANKS, copies=2)
BATCHES, STEPS = 4, 6  # room for a refused step, and for one that is run again
REFUSER, REFUSED_STEP, VICTIM, LAST_STEP = 1, 1, 3, 3


def weights() -> tuple[Tensor, Tensor]:
    """Returns the weights of all experts: gate and up, down."""
    seeded = torch.Generator().manual_seed(0)
    gate_up = torch.randn((EXPERTS, 2 * INNER, HIDDEN), generator=seeded) * HIDDEN**-0.5
    return gate_up, torch.randn((EXPERTS, HIDDEN, INNER), generator=seeded) * INNER**-0.5


def batch_of(rank: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, their experts, and the experts' weights. The first token chooses one expert
    twice."""
    seeded = torch.Generator().manual_seed(1 + number * RANKS + rank)
    x = torch.randn((TOKENS, HIDDEN), generator=seeded)
    largest = torch.randn((TOKENS, EXPERTS), generator=seeded).topk(TOP_K)
    ids = largest.indices
    ids[0, 1] = ids[0, 0]
    return x, ids, largest.values.softmax(dim=1)


def dense(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Computes the layer in one process."""
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(*weights(), strict=True)):
        gate, up = linear(x, gate_up).chunk(2, dim=1)
        share = (shares * (ids == expert)).sum(dim=1, keepdim=True)
        out += share * linear(silu(gate) * up, down)
    return out


def run_rank(rank: int, key: str, parent: Connection) -> None:
    torch.set_num_threads(1)

    def exchange(address: str) -> list[str]:
        parent.send(address)
        addresses: list[str] = parent.recv()
        return addresses

    number, worst = 0, 0.0
    said: list[str] = []
    gate_up, down = (each[list(PLACEMENT.ranks[rank])] for each in weights())
    with AllToAll(
        SHAPE, rank=rank, ranks=RANKS, cluster_key=key, exchange=exchange, placement=PLACEMENT
    ) as group:
        layer = MoEAllToAll(group, GroupedExperts(gate_up, down))
        for step in range(STEPS):
            # All ranks run all steps; a rank that has no tokens left runs them with none.
            x, ids, shares = (
                each[: TOKENS * (number < BATCHES)] for each in batch_of(rank, number)
            )
            refuses = (rank, step) == (REFUSER, REFUSED_STEP)
            try:
                layer.dispatch(x, ids + EXPERTS if refuses else ids, shares)
                if (rank, step) == (VICTIM, LAST_STEP):  # once the tokens of all ranks are here
                    layer.experts.register_forward_pre_hook(
                        lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                    )
                layer.compute()
                combined = layer.combine()
            except (InvalidArgument, StepRefused) as error:
                said.append(f"step {step}: {type(error).__name__}: {error}")
                continue
            if combined.missing:
                said.append(f"step {step}: without rank {combined.missing[0]}, so it is sent again")
            elif len(x):
                worst = max(worst, float((combined.out - dense(x, ids, shares)).abs().max()))
                number += 1
        said.append(f"{number} batches as in one process, at most {worst:.0e} apart")
    parent.send(said)


def main() -> None:
    context, key = multiprocessing.get_context("spawn"), secrets.token_hex(32)
    ranks = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(rank, key, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    addresses = [pipe.recv() for _, pipe in ranks]
    for _, pipe in ranks:
        pipe.send(addresses)
    for rank, (process, pipe) in enumerate(ranks):
        try:
            lines = pipe.recv()
        except EOFError:
            lines = ["killed"]
        process.join()
        print(*[f"rank {rank}  {line}" for line in lines], sep="\n")


if __name__ == "__main__":
    main()
