"""A model with experts, spread over four processes; one is killed while they generate.

Each expert is on two ranks, so that the others generate what one process with all experts does.

    python examples/python/moe_generation.py [--copies 1]
"""

from __future__ import annotations

import argparse
import secrets

from kvxfer.moe import Placement
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.expert_parallel.plan import Plan
from kvxfer.reference.expert_parallel.ranks import ExpertRanks
from kvxfer.reference.experts import DenseExperts
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import seeded_weights

CONFIG = LlamaConfig(
    name="experts",
    vocab_size=256,
    hidden_size=256,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    max_position=1024,
    num_experts=16,
    experts_per_token=2,
)
SEED = 0
RANKS = 4
VICTIM = 2
MAX_TOKENS = 32
PROMPTS = [[tuple(f"the prompt of rank {rank}".encode())] for rank in range(RANKS)]


def dense() -> list[list[list[int]]]:
    """Returns what one process generates for the prompts of all ranks."""
    model = LlamaModel(CONFIG, seeded_weights(CONFIG, SEED), experts=DenseExperts(CONFIG, SEED))
    runner = ModelRunner(model, ByteTokenizer(), PagedKvCache(CONFIG, 64, 16))
    return [
        [runner.generate(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
        for prompts in PROMPTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generation while a rank is killed")
    parser.add_argument(
        "--copies",
        type=int,
        choices=range(1, RANKS + 1),
        default=2,
        help="ranks that have each expert",
    )
    copies = parser.parse_args().copies
    plan = Plan(
        config=CONFIG,
        seed=SEED,
        placement=Placement.even(CONFIG.num_experts, RANKS, copies),
        prompts=PROMPTS,
        max_tokens=MAX_TOKENS,
        cluster_key=secrets.token_hex(32),
    )
    with ExpertRanks(plan) as ranks:
        for rank in ranks.generated():
            if rank == VICTIM and len(ranks.tokens[VICTIM][0]) == MAX_TOKENS // 2:
                ranks.kill(VICTIM)
    for rank, (ours, theirs) in enumerate(zip(ranks.tokens, dense(), strict=True)):
        how = ranks.ended.get(rank)
        if how is None:
            print(f"rank {rank}  killed after {len(ours[0])} tokens")
            continue
        same = "as one process" if ours == theirs else "other than one process"
        print(
            f"rank {rank}  {len(ours[0])} tokens, {same}; {how.repeated} steps repeated, "
            f"{how.absent} outputs of experts absent"
        )


if __name__ == "__main__":
    main()
