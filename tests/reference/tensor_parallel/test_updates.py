"""Weights that training ranks push are served by a group of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from torch import Tensor

from kvxfer.errors import RequestAborted, WeightUpdateAborted, WrongVersion
from kvxfer.reference.shards import Shard, cut, holdings_of
from kvxfer.reference.tensor_parallel.model import TensorParallelModel
from kvxfer.reference.tensor_parallel.runner import GroupRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.versions import Policy
from kvxfer.reference.weight_receiver import Receivers
from kvxfer.reference.weights import seeded_weights
from kvxfer.weights.trainer import Trainer
from kvxfer.weights.transfer.settings import UpdateSettings
from tests.reference.tiny import TINY
from verify.polling import PATIENCE, eventually

from .groups import group
from .test_runner import PROMPT, Held, expected

pytestmark = pytest.mark.native


class Training:
    """Two training ranks, each with half of every parameter."""

    def __init__(self, key: str) -> None:
        self.seed = 0
        self.ranks: list[Trainer] = []
        for rank in range(2):
            shard = Shard(rank, 2)
            self.ranks.append(
                Trainer(
                    holdings_of(TINY, shard),
                    lambda shard=shard: self._boxes(shard),  # type: ignore[misc]
                    rank=rank,
                    world_size=2,
                    cluster_key=key,
                    coordinator=self.ranks[0].coordinator if self.ranks else None,
                    settings=UpdateSettings(commit_seconds=PATIENCE),
                    fabrics=["local"],
                )
            )

    def _boxes(self, shard: Shard) -> dict[str, Tensor]:
        boxes = cut(TINY, seeded_weights(TINY, self.seed), shard)
        return {name: box.contiguous() for name, box in boxes.items()}

    async def push(self, version: int) -> str:
        """Pushes the weights of this seed; returns the state of the instance."""
        self.seed = version
        pushes = [rank.push(version) for rank in self.ranks]
        reports = [await asyncio.to_thread(push.result, 2 * PATIENCE) for push in pushes]
        (instance,) = reports[0].instances
        if instance.state == "committed":
            assert instance.pause_seconds is not None
            assert 0 < instance.pause_seconds < PATIENCE
        return f"{instance.state}: {instance.error}"


@pytest_asyncio.fixture
async def training() -> AsyncIterator[tuple[Training, str]]:
    key = secrets.token_hex(16)
    training = Training(key)
    yield training, key
    for rank in training.ranks:
        await asyncio.to_thread(rank.close)


@contextlib.asynccontextmanager
async def serving(
    training: tuple[Training, str], folder: Path, policy: Policy
) -> AsyncIterator[tuple[Training, TensorParallelModel, GroupRunner]]:
    job, key = training
    receivers = Receivers(
        config=TINY,
        instance_id="group",
        cluster_key=key,
        coordinator=job.ranks[0].coordinator,
        options={"fabrics": ["local"]},
    )
    with group(2, folder, staging=receivers) as model:
        async with GroupRunner(model, ByteTokenizer(), policy=policy) as runner:
            await asyncio.to_thread(job.ranks[0].wait_for, 1, 2 * PATIENCE)
            yield job, model, runner


async def test_each_push_is_served(training: tuple[Training, str], tmp_path: Path) -> None:
    async with serving(training, tmp_path, Policy.DRAIN) as (job, _, runner):
        assert (await runner.generate(PROMPT, 8)).tokens == expected(1, 8)
        for version in (2, 3):
            assert await job.push(version) == "committed: None"
            answer = await runner.generate(PROMPT, 8, weights_version=version)
            assert answer.tokens == expected(version, 8)
        with pytest.raises(WrongVersion, match="demands version 2 of the weights and 3 is served"):
            await runner.generate(PROMPT, 8, weights_version=2)


async def test_a_running_request_is_aborted_by_a_push(
    training: tuple[Training, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(training, tmp_path, Policy.ABORT) as (job, model, runner):
        held = Held(model, monkeypatch)
        request = asyncio.create_task(runner.generate(PROMPT, 64))
        await eventually(lambda: held.steps == 3)
        push = asyncio.create_task(job.push(2))
        await eventually(runner._updating.locked)
        held.goes_on.set()
        with pytest.raises(RequestAborted):
            await request
        assert await push == "committed: None"
        assert (await runner.generate(PROMPT, 8)).tokens == expected(2, 8)


async def test_a_rank_that_is_lost_before_the_commit_aborts_the_update(
    training: tuple[Training, str], tmp_path: Path
) -> None:
    async with serving(training, tmp_path, Policy.DRAIN) as (job, model, _):
        os.kill(model.processes[0], signal.SIGKILL)
        with pytest.raises(WeightUpdateAborted):
            await job.push(2)
