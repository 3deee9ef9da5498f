"""Workers whose weights a training rank updates: what they answer, and what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from kvxfer.engine import Engine
from kvxfer.errors import (
    KvxferError,
    LayoutMismatch,
    RequestAborted,
    TransferCancelled,
    WrongVersion,
)
from kvxfer.instances import Role
from kvxfer.model_identity import ModelIdentity
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.shards import WHOLE, holdings_of
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.versions import Policy
from kvxfer.reference.weights import seeded_weights
from kvxfer.reference.worker.updates import WorkerUpdates
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.trainer import Trainer
from kvxfer.weights.transfer.settings import UpdateSettings
from verify.polling import PATIENCE, eventually

from .test_worker_service import PROMPT, complete, hold_prefill_at
from .tiny import TINY
from .workers import Worker, WorkerPair, start_worker

pytestmark = pytest.mark.native


def expected(seed: int, tokens: int) -> list[int]:
    model = LlamaModel(TINY, seeded_weights(TINY, seed))
    return ModelRunner(model, ByteTokenizer(), PagedKvCache(TINY, 32, 4)).generate(PROMPT, tokens)


@dataclass
class Job:
    """A pair of workers with the weights of seed 1, and a training rank."""

    workers: WorkerPair
    trainer: Trainer
    updates: list[WorkerUpdates]
    seed: int = 0

    async def push(self, version: int) -> UpdateReport:
        """Pushes the weights of this seed to the workers that take updates."""
        self.seed = version
        push = self.trainer.push(version)
        return await asyncio.to_thread(push.result, 2 * PATIENCE)

    async def pushed(self, version: int) -> UpdateReport:
        """Pushes to both workers; returns when they know each other's new version."""
        report = await self.push(version)

        def known() -> bool:
            return all(
                connection._hello is not None
                and connection._hello.model is not None
                and connection._hello.model.weights_version == version
                for worker in (self.workers.prefill, self.workers.decode)
                for connection in worker.endpoint._connections
            )

        await eventually(known)
        return report


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


async def started(
    stack: contextlib.AsyncExitStack, *taking: Role, arena_bytes: int | None = None
) -> Job:
    """Starts a pair; workers of these roles take updates, in waves if the arena has a bound."""
    key = secrets.token_hex(16)
    job: Job
    trainer = Trainer(
        holdings_of(TINY, WHOLE),
        lambda: seeded_weights(TINY, job.seed),
        rank=0,
        world_size=1,
        cluster_key=key,
        settings=UpdateSettings(mode="atomic" if arena_bytes is None else "wave"),
        fabrics=["local"],
    )
    stack.push_async_callback(asyncio.to_thread, trainer.close)
    made: list[Worker] = []
    updates = []
    for role in (Role.PREFILL, Role.DECODE):
        model = LlamaModel(TINY, seeded_weights(TINY, 1))
        worker = await start_worker(
            stack, role, key, "local", model=model, identity=ModelIdentity(checkpoint="tiny")
        )
        made.append(worker)
        if role in taking:
            engine = await stack.enter_async_context(Engine(cluster_key=key, fabrics=["local"]))
            updates.append(WorkerUpdates(model, worker.gate, worker.endpoint))
            await stack.enter_async_context(
                updates[-1].receiving(engine, trainer.coordinator, "float32", arena_bytes)
            )
    await asyncio.to_thread(trainer.wait_for, len(taking), 2 * PATIENCE)
    job = Job(WorkerPair(*made, key), trainer, updates)
    return job


@pytest.mark.parametrize(("arena_bytes", "waves"), [(None, 1), (128 << 10, 4)])
async def test_workers_answer_with_what_was_pushed(
    stack: contextlib.AsyncExitStack, arena_bytes: int | None, waves: int
) -> None:
    job = await started(stack, Role.PREFILL, Role.DECODE, arena_bytes=arena_bytes)
    workers = job.workers
    _, before = await complete(workers, workers.request(PROMPT, max_tokens=8))
    assert before.choices[0].token_ids == expected(1, 8)
    for version in (2, 5):
        report = await job.pushed(version)
        assert report.waves == waves
        assert [each.state for each in report.instances] == ["committed"] * 2
        assert all(0 < (each.pause_seconds or 0) < PATIENCE for each in report.instances)
        for worker in (workers.prefill, workers.decode):
            assert worker.endpoint.model == ModelIdentity(
                checkpoint="tiny", weights_version=version
            )
            assert worker.service.health().weights_version == version
        request = workers.request(PROMPT, max_tokens=8, weights_version=version)
        prefill, decode = await complete(workers, request)
        assert decode.choices[0].token_ids == expected(version, 8)
        assert prefill.weights_version == decode.weights_version == version
        assert [each.model_dump() for each in decode.weights_versions] == [
            {"version": version, "first": 0, "tokens": 8}
        ]
    for worker in (workers.prefill, workers.decode):
        with pytest.raises(WrongVersion, match="demands version 2 of the weights and 5 is served"):
            await worker.service.complete(workers.request(PROMPT, weights_version=2))
    await eventually(workers.all_blocks_free)


async def test_workers_of_different_versions_exchange_no_cache(
    stack: contextlib.AsyncExitStack,
) -> None:
    job = await started(stack, Role.PREFILL)
    workers = job.workers
    await complete(workers, workers.request(PROMPT, max_tokens=2))
    await job.push(2)
    with pytest.raises(LayoutMismatch, match="weights_version"):
        await workers.decode.service.complete(workers.request(PROMPT, max_tokens=2))
    await eventually(workers.all_blocks_free)


async def test_an_update_aborts_a_prompt_that_is_computed(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await started(stack, Role.PREFILL, Role.DECODE)
    workers = job.workers
    for worker in (workers.prefill, workers.decode):
        monkeypatch.setattr(worker.gate, "_policy", Policy.ABORT)
    layers = hold_prefill_at(workers, monkeypatch, layer=1)
    request = workers.request(PROMPT, max_tokens=4)
    sides = [
        asyncio.create_task(worker.service.complete(request))
        for worker in (workers.prefill, workers.decode)
    ]
    await eventually(layers.reached.is_set)
    push = asyncio.create_task(job.pushed(2))
    await eventually(lambda: not workers.prefill.gate._open.is_set())
    layers.go_on.set()
    for side in sides:
        # A side whose peer was updated first learns of that from the peer.
        with pytest.raises((RequestAborted, TransferCancelled, LayoutMismatch)):
            await side
    report = await push
    assert [each.state for each in report.instances] == ["committed"] * 2
    assert layers.computed == [0, 1]
    monkeypatch.undo()
    _, again = await complete(workers, workers.request(PROMPT, max_tokens=4))
    assert again.choices[0].token_ids == expected(2, 4)
    await eventually(workers.all_blocks_free)


async def test_a_kept_decode_reports_which_tokens_are_of_which_version(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await started(stack, Role.PREFILL, Role.DECODE)
    workers = job.workers
    monkeypatch.setattr(workers.decode.gate, "_policy", Policy.KEEP)
    request = workers.request(PROMPT, max_tokens=8)
    prefill = asyncio.create_task(workers.prefill.service.complete(request))
    tokens: list[tuple[int, int]] = []
    async with contextlib.aclosing(
        workers.decode.service.stream(request.model_copy(update={"stream": True}))
    ) as chunks:
        async for chunk in chunks:
            tokens.append((chunk.weights_version, *chunk.choices[0].token_ids))
            if len(tokens) == 3:
                await prefill
                await job.push(2)
    assert [version for version, _ in tokens] == [0] * 3 + [2] * 5
    assert [token for _, token in tokens[:3]] == expected(1, 3)
    await eventually(workers.all_blocks_free)


@pytest.mark.parametrize(
    ("policy", "demanded", "error"),
    [(Policy.ABORT, None, RequestAborted), (Policy.KEEP, 0, WrongVersion)],
)
async def test_a_decode_that_may_not_continue_with_other_weights_ends(
    policy: Policy,
    demanded: int | None,
    error: type[KvxferError],
    stack: contextlib.AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = await started(stack, Role.PREFILL, Role.DECODE)
    workers = job.workers
    monkeypatch.setattr(workers.decode.gate, "_policy", policy)
    request = workers.request(PROMPT, max_tokens=8, weights_version=demanded)
    prefill = asyncio.create_task(workers.prefill.service.complete(request))
    tokens: list[int] = []
    async with contextlib.aclosing(
        workers.decode.service.stream(request.model_copy(update={"stream": True}))
    ) as chunks:
        with pytest.raises(error):
            async for chunk in chunks:
                tokens += chunk.choices[0].token_ids
                if len(tokens) == 3:
                    await prefill
                    await job.push(2)
    assert tokens == expected(1, 3)
    await eventually(workers.all_blocks_free)


async def test_a_failed_update_takes_the_worker_out_of_service(
    stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await started(stack, Role.DECODE)
    (updates,) = job.updates

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(updates._model, "apply", fail)
    report = await job.push(2)
    assert [each.state for each in report.instances] == ["failed"]
    await asyncio.wait_for(updates.failed(), PATIENCE)
    with pytest.raises(KvxferError, match="could not be replaced: MemoryError"):
        await job.workers.decode.service.complete(job.workers.request(PROMPT))
