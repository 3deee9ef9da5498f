"""The training job trains, saves its weights, and pushes what it saves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from kvxfer.engine import Engine
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.transfer.receiver import WeightReceiver
from kvxfer.weights.transfer.staged import Staged
from verify.processes.weights.training import KEY, TrainingJob

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingJob]:
    with TrainingJob(tmp_path_factory.mktemp("job"), world_size=3, layers=2, seed=7) as job:
        yield job


def half(whole: dict[str, torch.Tensor], rank: int) -> Holdings:
    """Returns the holdings of a rank with the first or the second half of each parameter's rows."""
    rows = {name: each.shape[0] // 2 for name, each in whole.items()}
    return Holdings(
        tuple(
            Holding(
                name,
                str(each.dtype).removeprefix("torch."),
                tuple(each.shape),
                (rank * rows[name], *(0 for _ in each.shape[1:])),
                (rows[name], *each.shape[1:]),
            )
            for name, each in whole.items()
        )
    )


def staged(receiver: WeightReceiver) -> dict[str, torch.Tensor]:
    memory = torch.frombuffer(receiver.memory, dtype=torch.uint8)
    return {
        name: memory[place.offset : place.offset + place.nbytes]
        .view(getattr(torch, place.holding.dtype))
        .view(place.holding.shape)
        .clone()
        for name, place in receiver.arena.places.items()
    }


def test_a_step_changes_each_weight_by_a_large_amount(job: TrainingJob, tmp_path: Path) -> None:
    before = load_file(job.save(tmp_path / "before") / "model.safetensors")
    job.step()
    after = load_file(job.save(tmp_path / "after") / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        # AdamW moves a weight with a gradient by its rate; tokens that no rank drew have no
        # gradient.
        assert (after[name] - weight).abs().median() > 0.04 or "embed" in name
    LlamaForCausalLM.from_pretrained(tmp_path / "after")


async def test_pushed_weights_are_the_saved_ones(job: TrainingJob, tmp_path: Path) -> None:
    whole = load_file(job.save(tmp_path / "start") / "model.safetensors")
    served: list[dict[str, torch.Tensor]] = []
    receivers: list[WeightReceiver] = []

    async def commit(update: Staged) -> None:
        receivers[1].applied(receivers[1].pin(update.update_id))
        served.append({**(staged(receivers[0]))})
        served.append({**(staged(receivers[1]))})

    coordinator = await asyncio.to_thread(job.connect, options={"fabrics": ["tcp"]})
    async with contextlib.AsyncExitStack() as stack:
        for rank in range(2):
            engine = await stack.enter_async_context(Engine(cluster_key=KEY, fabrics=["tcp"]))
            receiver = WeightReceiver(
                engine,
                half(whole, rank),
                instance_id="i0",
                rank=rank,
                ranks=2,
                commit=None if rank else commit,
            )
            receivers.append(await stack.enter_async_context(receiver))
            await receiver.join(coordinator)
        await asyncio.to_thread(job.wait_for, 1)
        for version in (1, 2):
            await asyncio.to_thread(job.step)
            report = await asyncio.to_thread(job.push, version)
            assert report["state"] == "committed", report
            folder = await asyncio.to_thread(job.save, tmp_path / str(version))
            saved = load_file(folder / "model.safetensors")
            first, second = served[-2:]
            for name, weight in saved.items():
                assert torch.equal(torch.cat([first[name], second[name]]), weight), name
    await asyncio.to_thread(job.do, "close")


def test_the_error_of_a_failed_push_says_why(job: TrainingJob) -> None:
    job.connect(options={"fabrics": ["tcp"]})
    assert job.push(3)["code"] == "weight-update-aborted"
    job.do("close")


def test_equal_seeds_train_alike_and_the_error_names_a_killed_rank(tmp_path: Path) -> None:
    weights = []
    for name in "ab":
        with TrainingJob(tmp_path, world_size=2, layers=1, seed=1) as job:
            job.step(2)
            weights.append(load_file(job.save(tmp_path / name) / "model.safetensors"))
            if name == "a":
                job.quit()
                continue
            job.kill_rank(1)
            assert job.event("ended").result(60)["rank"] == 1
            with pytest.raises(AssertionError, match="rank 1 has ended"):
                job.do("close")
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())
