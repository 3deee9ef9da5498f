"""Requests over a group while its weights are replaced."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from kvxfer.errors import KvxferError, NotStaged, RankLost, RequestAborted, WrongVersion
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.tensor_parallel.model import TensorParallelModel
from kvxfer.reference.tensor_parallel.runner import Generated, GroupRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.versions import Policy, VersionSpan
from kvxfer.reference.weights import seeded_weights
from tests.reference.tiny import TINY
from verify.polling import PATIENCE, eventually, turns

from .groups import PATIENT, group, told

pytestmark = pytest.mark.native

PROMPT = "what a request of one version gives"


def expected(seed: int, tokens: int) -> list[int]:
    """Returns the greedy tokens of one process; two ranks with seeded weights give the same."""
    model = LlamaModel(TINY, seeded_weights(TINY, seed))
    return ModelRunner(model, ByteTokenizer(), PagedKvCache(TINY, 32, 4)).generate(PROMPT, tokens)


class Held:
    """Holds the third step of a group's model until `goes_on` is set."""

    def __init__(self, model: TensorParallelModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.goes_on = threading.Event()
        decode = model.decode

        def held(*args: object) -> object:
            self.steps += 1
            if self.steps == 3:
                assert self.goes_on.wait(PATIENCE)
            return decode(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(model, "decode", held)


@pytest_asyncio.fixture
async def model(tmp_path: Path) -> AsyncIterator[TensorParallelModel]:
    with group(2, tmp_path) as model:
        yield model


@pytest_asyncio.fixture
async def runner(model: TensorParallelModel) -> AsyncIterator[GroupRunner]:
    async with GroupRunner(model, ByteTokenizer()) as runner:
        yield runner


async def meeting(
    runner: GroupRunner,
    model: TensorParallelModel,
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy,
    **kwargs: int,
) -> tuple[asyncio.Task[Generated], float]:
    """Starts a request of 64 tokens, and an update to the weights of seed 2 in its fourth token.
    Returns the request's task, and the seconds that the update paused serving."""
    held = Held(model, monkeypatch)
    request = asyncio.create_task(runner.generate(PROMPT, 64, **kwargs))
    await eventually(lambda: held.steps == 3)
    update = asyncio.create_task(runner.update("seed:2", policy))
    await eventually(runner._updating.locked)
    held.goes_on.set()
    pause = await asyncio.wait_for(update, PATIENCE)
    return request, pause


async def test_drain(
    runner: GroupRunner, model: TensorParallelModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request, pause = await meeting(runner, model, monkeypatch, Policy.DRAIN)
    old = await request
    assert (old.tokens, old.spans) == (expected(1, 64), [VersionSpan(0, 0, 64)])
    new = await runner.generate(PROMPT, 8, weights_version=2)
    assert (new.tokens, new.spans) == (expected(2, 8), [VersionSpan(2, 0, 8)])
    assert 0 < pause < PATIENCE
    assert told(tmp_path, 0)[-1] == "applied 2 True"


async def test_abort(
    runner: GroupRunner, model: TensorParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = await meeting(runner, model, monkeypatch, Policy.ABORT)
    with pytest.raises(RequestAborted, match="send the request again"):
        await request
    again = await runner.generate(PROMPT, 8)
    assert (again.tokens, again.weights_version) == (expected(2, 8), 2)


async def test_keep(
    runner: GroupRunner, model: TensorParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = await meeting(runner, model, monkeypatch, Policy.KEEP)
    kept = await request
    first, second = kept.spans
    assert (first.version, second.version, first.tokens + second.tokens) == (0, 2, 64)
    assert second.first == first.tokens >= 3
    assert kept.tokens[: first.tokens] == expected(1, first.tokens)
    assert kept.tokens != expected(1, 64)
    assert kept.weights_version == 2


async def test_requests_at_the_same_time_are_each_of_one_version(runner: GroupRunner) -> None:
    """Updates arrive at any moment, while some requests run and others arrive."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    answers: list[Generated] = []

    async def ask() -> None:
        await turns(rng, 2000)
        answers.append(await runner.generate(PROMPT, 4))

    async def update() -> None:
        for version in (2, 3):
            await turns(rng, 1000)
            await runner.update(f"seed:{version}", Policy.DRAIN)

    await asyncio.gather(update(), *(ask() for _ in range(12)))
    seeds = {0: 1, 2: 2, 3: 3}
    for answer in answers:
        assert len(answer.spans) == 1
        assert answer.tokens == expected(seeds[answer.weights_version], 4)
    assert runner.weights_version == 3


async def test_an_update_that_is_not_staged_changes_nothing(
    runner: GroupRunner, tmp_path: Path
) -> None:
    (tmp_path / "pin-1").touch()
    with pytest.raises(NotStaged, match="rank 1"):
        await runner.update("seed:2")
    answer = await runner.generate(PROMPT, 4, weights_version=0)
    assert answer.tokens == expected(1, 4)
    with pytest.raises(WrongVersion, match="demands version 2 of the weights and 0 is served"):
        await runner.generate(PROMPT, 4, weights_version=2)


@pytest.mark.parametrize("sign", ["apply-0", "apply-1", "freeze-1"])
async def test_a_rank_that_fails_while_applying_ends_the_service(sign: str, tmp_path: Path) -> None:
    settings = replace(PATIENT, patience_seconds=1.0)
    with group(2, tmp_path, settings=settings) as model:
        async with GroupRunner(model, ByteTokenizer()) as runner:
            await runner.generate(PROMPT, 2)
            (tmp_path / sign).touch()
            with pytest.raises((RankLost, OSError)):
                await runner.update("seed:2")
            for _ in range(2):
                with pytest.raises(KvxferError, match=r"memory of the update is gone|is frozen"):
                    await runner.generate(PROMPT, 2)
            assert any(line.startswith("broken") for line in told(tmp_path, 0))


async def test_a_killed_rank_ends_running_requests(
    runner: GroupRunner, model: TensorParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(model, monkeypatch)
    requests = [asyncio.create_task(runner.generate(PROMPT, 8)) for _ in range(2)]
    await eventually(lambda: held.steps == 3)
    os.kill(model.processes[0], signal.SIGKILL)
    held.goes_on.set()
    for request in requests:
        with pytest.raises(RankLost, match=r"rank 1 of 2 .* was ended by SIGKILL"):
            await request
