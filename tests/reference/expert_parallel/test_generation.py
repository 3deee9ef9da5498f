"""A model whose experts are spread over processes generates the same tokens as in one process."""

from __future__ import annotations

import itertools
import os
import signal
from multiprocessing.connection import Connection

import pytest
from torch import Tensor

from kvxfer.moe import Dispatched, Placement
from kvxfer.reference.expert_parallel.plan import Plan
from kvxfer.reference.expert_parallel.rank import run
from kvxfer.reference.expert_parallel.ranks import ExpertRanks
from kvxfer.reference.expert_parallel.spread import TokenExperts
from kvxfer.reference.experts import DenseExperts
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import seeded_weights
from tests.reference.tiny import TINY_EXPERTS

SEED = 3
MAX_TOKENS = 16
VICTIM = 2
# The last rank has no prompts and computes for the others.
PROMPTS = [
    [tuple(b"each rank answers its own"), tuple(b"one after another")],
    [tuple(b"x"), tuple(b"attention is everywhere")],
    [tuple(b"this one is killed"), tuple(b"never reached")],
    [],
]


@pytest.fixture(scope="module")
def dense() -> list[list[list[int]]]:
    """The tokens that one process generates."""
    experts = DenseExperts(TINY_EXPERTS, SEED)
    model = LlamaModel(TINY_EXPERTS, seeded_weights(TINY_EXPERTS, SEED), experts=experts)
    runner = ModelRunner(model, ByteTokenizer(), PagedKvCache(TINY_EXPERTS, 16, 16))
    return [
        [runner.generate(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
        for prompts in PROMPTS
    ]


def plan(copies: int, fabric: str = "local") -> Plan:
    return Plan(
        config=TINY_EXPERTS,
        seed=SEED,
        placement=Placement.even(TINY_EXPERTS.num_experts, len(PROMPTS), copies),
        prompts=PROMPTS,
        max_tokens=MAX_TOKENS,
        cluster_key="k" * 32,
        fabrics=("tcp",) if fabric == "tcp" else ("local", "tcp"),
    )


@pytest.mark.parametrize("fabric", ["local", "tcp"])
@pytest.mark.parametrize("copies", [1, 2])
def test_the_tokens_of_each_rank_are_those_of_the_dense_form(
    fabric: str, copies: int, dense: list[list[list[int]]]
) -> None:
    with ExpertRanks(plan(copies, fabric)) as ranks:
        for _ in ranks.generated():
            pass
    assert ranks.tokens == dense
    assert sorted(ranks.ended) == [0, 1, 2, 3]
    for how in ranks.ended.values():
        assert (how.members, how.repeated, how.absent) == ((0, 1, 2, 3), 0, 0)


def ends_within_a_step(plan: Plan, rank: int, connection: Connection) -> None:
    """Kills the victim when it has taken the tokens of a step, so that others miss its experts'
    answers."""
    if rank == VICTIM:
        calls, compute = itertools.count(), TokenExperts.__call__

        def end(self: TokenExperts, got: Dispatched) -> Tensor:
            if next(calls) >= 20 and len(got.x):
                os.kill(os.getpid(), signal.SIGKILL)
            return compute(self, got)

        TokenExperts.__call__ = end  # type: ignore[method-assign]
    run(plan, rank, connection)


def kill_in_mid_generation(ranks: ExpertRanks) -> None:
    """Kills the victim after a few of its tokens, while all ranks have tokens left to generate."""
    heard = 0
    for rank in ranks.generated():
        heard += rank == VICTIM
        if heard == 5:
            heard += 1
            ranks.kill(VICTIM)


@pytest.mark.realtime
@pytest.mark.parametrize("fabric", ["local", "tcp"])
def test_with_replicas_the_other_ranks_generate_the_same_when_a_rank_is_killed(
    fabric: str, dense: list[list[list[int]]]
) -> None:
    with ExpertRanks(plan(2, fabric)) as ranks:
        kill_in_mid_generation(ranks)
    assert sorted(ranks.ended) == [0, 1, 3]
    for rank, how in ranks.ended.items():
        assert (how.members, how.absent) == ((0, 1, 3), 0)
        assert ranks.tokens[rank] == dense[rank]
    first, second = ranks.tokens[VICTIM]
    assert len(first) >= 5
    assert [*first, *second] == [*dense[VICTIM][0], *dense[VICTIM][1]][: len(first) + len(second)]
    assert len(second) < MAX_TOKENS


@pytest.mark.realtime
@pytest.mark.parametrize("fabric", ["local", "tcp"])
def test_a_step_in_which_a_rank_is_lost_is_repeated(
    fabric: str, dense: list[list[list[int]]]
) -> None:
    with ExpertRanks(plan(2, fabric), ends_within_a_step) as ranks:
        for _ in ranks.generated():
            pass
    assert sorted(ranks.ended) == [0, 1, 3]
    for rank, how in ranks.ended.items():
        assert (how.members, how.absent) == ((0, 1, 3), 0)
        assert ranks.tokens[rank] == dense[rank]
    assert max(how.repeated for how in ranks.ended.values()) == 1


@pytest.mark.realtime
def test_without_replicas_the_other_ranks_go_on_without_the_experts_of_a_killed_rank(
    dense: list[list[list[int]]],
) -> None:
    with ExpertRanks(plan(1)) as ranks:
        kill_in_mid_generation(ranks)
    assert sorted(ranks.ended) == [0, 1, 3]
    for rank in (0, 1):
        assert ranks.ended[rank].members == (0, 1, 3)
        assert ranks.ended[rank].absent > 0
        assert [len(tokens) for tokens in ranks.tokens[rank]] == [MAX_TOKENS, MAX_TOKENS]
    assert ranks.tokens[:2] != dense[:2]
