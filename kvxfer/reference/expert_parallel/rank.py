"""The process of a rank: answers its prompts, and computes with its experts for all ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from kvxfer.moe import AllToAll
from kvxfer.reference.expert_parallel.messages import Ended, Failed, Generated, Here
from kvxfer.reference.expert_parallel.plan import Plan, Prompt
from kvxfer.reference.expert_parallel.spread import SpreadExperts
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import BLOCK_SIZE, ModelRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import expert_weights, seeded_weights


def run(plan: Plan, rank: int, connection: Connection) -> None:
    """Runs the process of a rank from start to end."""
    # Ctrl-C in the terminal is for the process that has started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(plan.threads)
    try:
        _take_part(plan, rank, connection)
    except BaseException as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def _take_part(plan: Plan, rank: int, connection: Connection) -> None:
    config, placement = plan.config, plan.placement_of_all_layers
    weights = [
        expert_weights(config, plan.seed, *divmod(expert, config.num_experts))
        for expert in placement.ranks[rank]
    ]

    def exchange(address: str) -> Sequence[str]:
        connection.send(Here(address))
        addresses: Sequence[str] = connection.recv()
        return addresses

    with AllToAll(
        plan.shape,
        rank=rank,
        ranks=plan.ranks,
        cluster_key=plan.cluster_key,
        exchange=exchange,
        placement=placement,
        timeout=plan.timeout,
        fabrics=plan.fabrics,
    ) as group:
        experts = SpreadExperts(group, weights, config.num_experts)
        model = LlamaModel(config, seeded_weights(config, plan.seed), experts=experts)
        work = _answers(plan, model, plan.prompts[rank])
        while group.next_step < plan.steps:
            found = next(work, None)
            if found is None:
                experts.idle()
            else:
                connection.send(found)
        connection.send(Ended(group.members, experts.repeated, experts.absent))


def _answers(plan: Plan, model: LlamaModel, prompts: Sequence[Prompt]) -> Iterator[Generated]:
    """Yields each token of the answers, after a pass of the model."""
    for number, prompt in enumerate(prompts):
        positions = len(prompt) + plan.max_tokens
        cache = PagedKvCache(plan.config, -(-positions // BLOCK_SIZE), BLOCK_SIZE)
        runner = ModelRunner(model, ByteTokenizer(), cache)
        blocks = range(runner.blocks_for(len(prompt), plan.max_tokens))
        first = runner.prefill(prompt, blocks)
        yield Generated(number, first)
        for token in runner.decode(first, len(prompt), blocks, plan.max_tokens):
            yield Generated(number, token)
