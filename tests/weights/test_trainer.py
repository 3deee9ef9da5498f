"""The blocking interface of a training loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvxfer import weights
from kvxfer.engine import Engine
from kvxfer.errors import DeadlineExceeded, InvalidArgument, WeightUpdateAborted
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.trainer import Trainer
from kvxfer.weights.transfer.receiver import WeightReceiver

from .transfer.job import KEY, Instance, boxes, shards
from .transfer.job import weights as version_weights
from .whole_quantization import quantized

pytestmark = pytest.mark.native


class _Serving:
    """An instance of one rank, on a loop in a thread."""

    def __init__(self, coordinator: str = "", holdings: Holdings | None = None) -> None:
        """Without a coordinator it is to be dialed, at `address`."""
        self.instance = Instance([])
        self.address = ""
        self._coordinator = coordinator
        self._holdings = holdings or shards(0, 1)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    async def _run(self) -> None:
        async with (
            Engine(cluster_key=KEY, fabrics=["local"]) as engine,
            WeightReceiver(
                engine, self._holdings, instance_id="i0", commit=self.instance.commit
            ) as receiver,
        ):
            self.instance.ranks.append(receiver)
            self.address = engine.address
            if self._coordinator:
                await receiver.join(self._coordinator)
            self._joined.set()
            await self._closing.wait()

    def __enter__(self) -> Instance:
        self._thread.start()
        self._joined.wait()
        return self.instance

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    """Two ranks, which send what `version_of` says."""
    made: list[Trainer] = []
    for rank in range(2):
        holdings = shards(rank, 2)
        made.append(
            Trainer(
                holdings,
                lambda holdings=holdings: boxes(holdings, version_weights(len(versions))),  # type: ignore[misc]
                rank=rank,
                world_size=2,
                cluster_key=KEY,
                coordinator=made[0].coordinator if made else None,
                fabrics=["local"],
            )
        )
    versions.clear()
    yield made
    for each in made:
        each.close()


versions: list[int] = []


def test_each_push_is_served(trainers: list[Trainer]) -> None:
    with _Serving(trainers[0].coordinator) as instance:
        trainers[0].wait_for(instances=1, timeout=60)
        for version in (1, 2):
            versions.append(version)
            pushes = [each.push(version) for each in trainers]
            for push in pushes:
                push.read(60)
                assert push.result(60).state == "committed"
            for name, box in version_weights(version).items():
                np.testing.assert_array_equal(instance.serves[0][name], box)


def test_a_push_without_instances_says_so(trainers: list[Trainer]) -> None:
    versions.append(1)
    pushes = [each.push(1) for each in trainers]
    for push in pushes:
        push.read(60)
        with pytest.raises(WeightUpdateAborted, match="no instance is connected"):
            push.result(60)


def test_a_rank_that_pushes_alone_waits_for_the_other(trainers: list[Trainer]) -> None:
    push = trainers[0].push(1)
    with pytest.raises(DeadlineExceeded, match=r"the update to 1 has not ended after 0\.1 s"):
        push.result(0.1)
    with pytest.raises(InvalidArgument, match="the push of version 1 has not ended"):
        trainers[0].push(2)


def test_a_push_that_is_refused_leaves_copies_as_they_are() -> None:
    made = 0

    def tensors() -> dict[str, np.ndarray]:
        nonlocal made
        made += 1
        return boxes(shards(0, 1), version_weights(1))

    with Trainer(
        shards(0, 1), tensors, rank=0, world_size=2, cluster_key=KEY, fabrics=["local"]
    ) as trainer:
        trainer.push(1)
        with pytest.raises(InvalidArgument, match="the push of version 1 has not ended"):
            trainer.push(2)
        assert made == 1


def test_a_model_of_torch_is_sent_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    model = torch.nn.Linear(140, 130)
    chosen = weights.linear_weights(weights.FP8_BLOCKS)
    serving = _Serving(holdings=weights.state_of(model, quantize=chosen).holdings)
    with serving as instance:
        for version in (1, 2):
            with torch.no_grad():
                model.weight.add_(version)
            push = weights.push(
                model, version, quantize=chosen, receivers=[serving.address], fabrics=["local"]
            )
            assert push.result(60).state == "committed"
            values, scales = quantized(model.weight.detach(), weights.FP8_BLOCKS)
            served = instance.serves[0]
            np.testing.assert_array_equal(served["weight"], values.view(torch.uint8).numpy())
            np.testing.assert_array_equal(served["weight_scale_inv"], scales.numpy())
        weights.forget(model)


def test_a_model_of_torch_is_pushed_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    model = torch.nn.Linear(40, 24)
    serving = _Serving(holdings=weights.state_of(model).holdings)
    with serving as instance:
        for version in (1, 2):
            with torch.no_grad():
                model.weight.add_(version)
            push = weights.push(model, version, receivers=[serving.address], fabrics=["local"])
            push.read(60)
            assert push.result(60).state == "committed"
            for name, parameter in model.named_parameters():
                np.testing.assert_array_equal(instance.serves[0][name], parameter.detach().numpy())
        weights.forget(model)


def test_rank_0_hosts_the_coordinator() -> None:
    with pytest.raises(InvalidArgument, match="training rank 1 has coordinator=None"):
        Trainer(shards(0, 1), dict, rank=1, world_size=2, cluster_key=KEY)
