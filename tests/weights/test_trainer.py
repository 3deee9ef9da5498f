"""The blocking interface of a training loop."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer import weights
from kvxfer.engine import Engine
from kvxfer.errors import (
    AuthenticationFailed,
    ConnectFailed,
    DeadlineExceeded,
    InvalidArgument,
    WeightsMismatch,
    WeightUpdateAborted,
)
from kvxfer.weights import pushing
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.trainer import Trainer
from kvxfer.weights.transfer.coordinator import WeightCoordinator
from kvxfer.weights.transfer.receiver import WeightReceiver
from verify.polling import eventually, wait_until
from verify.processes.process import ROOT, Process

from .transfer.job import KEY, Instance, boxes, shards
from .transfer.job import weights as version_weights
from .whole_quantization import quantized

pytestmark = pytest.mark.native


class _Serving:
    """An instance of one rank, on a loop in a thread."""

    def __init__(
        self, coordinator: str = "", holdings: Holdings | None = None, fabric: str = "local"
    ) -> None:
        """Joins the coordinator; without one, the trainer connects to `address`."""
        self._fabric = fabric
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
            Engine(cluster_key=KEY, fabrics=[self._fabric]) as engine,
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
    """Two ranks, which send the weights of the version `len(versions)`."""
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

    def chosen(name: str, _: tuple[int, ...]) -> weights.Quantization | None:
        return weights.FP8_BLOCKS if name == "weight" else None

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


def test_a_push_sends_the_current_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    model = torch.nn.Linear(40, 24)
    serving = _Serving(holdings=weights.state_of(model).holdings)
    with serving as instance:

        def push(version: int) -> None:
            pushed = weights.push(model, version, receivers=[serving.address], fabrics=["local"])
            assert pushed.result(60).state == "committed"
            for name, parameter in model.named_parameters():
                np.testing.assert_array_equal(instance.serves[0][name], parameter.detach().numpy())

        push(1)
        model.weight.data = torch.full((24, 40), 7.0)
        push(2)
        model.load_state_dict({"weight": torch.ones(24, 40), "bias": torch.ones(24)}, assign=True)
        push(3)
        model.weight.data = model.weight.data.half()
        with pytest.raises(WeightsMismatch, match=r"^weight was float32.* and is float16"):
            weights.push(model, 4)
        assert instance.ranks[0].version == 3
        weights.forget(model)
        model.float()
        push(4)
        weights.forget(model)


def test_a_pushed_model_is_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    model = torch.nn.Linear(4, 2)
    serving = _Serving(holdings=weights.state_of(model).holdings)
    with serving:
        weights.push(model, 1, receivers=[serving.address], fabrics=["local"]).result(60)
        [trainer] = pushing._trainers.values()
        known = weakref.ref(model)
        del model
        gc.collect()
        assert known() is None
        trainer.close()


def test_a_rank_whose_parameters_changed_ends_the_push_of_the_other(
    trainers: list[Trainer],
) -> None:
    def changed() -> dict[str, np.ndarray]:
        raise WeightsMismatch("embed was 1, and is 2")

    with _Serving(trainers[0].coordinator) as instance:
        trainers[0].wait_for(instances=1, timeout=60)
        tensors, trainers[1]._tensors = trainers[1]._tensors, changed
        versions.append(1)
        pushed = trainers[0].push(1)
        with pytest.raises(WeightsMismatch, match="embed was 1, and is 2"):
            trainers[1].push(1)
        with pytest.raises(WeightsMismatch, match="training rank 1 cannot send it: embed was 1"):
            pushed.result(60)
        pushed.read(60)
        assert instance.commits == 0
        trainers[1]._tensors = tensors
        for push in [each.push(1) for each in trainers]:
            assert push.result(60).version == 1


def test_ranks_push_together_and_fail_together(tmp_path: Path) -> None:
    """Runs pushing_ranks.py: two ranks over gloo, with FSDP."""
    serving = _Serving(holdings=weights.state_of(torch.nn.Linear(6, 4)).holdings, fabric="tcp")
    with serving as instance:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "KVXFER_CLUSTER_KEY": KEY,
        }
        command = (sys.executable, "-m", "tests.weights.pushing_ranks", tmp_path, serving.address)
        with Process("ranks", *command, environment=environment) as process:
            process.ends(seconds=200)
        [zero, one] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        refusal = "value is a int; give tensors, or drop it"
        assert zero["first"] == f"InvalidArgument: training rank 1: {refusal}"
        assert one["first"] == f"InvalidArgument: {refusal}"
        assert zero["sent"] == one["sent"] == ["committed", "committed"]
        change = (
            "bias was float32 of [4], box [2] at [2], and is float16 of [4], box [2] at [2] since"
        )
        assert one["changed"].startswith(f"WeightsMismatch: {change}")
        assert zero["changed"].startswith("WeightsMismatch")
        assert f"training rank 1 cannot send it: {change}" in zero["changed"]
        assert instance.ranks[0].version == 3
        assert instance.serves[0]["weight"].tolist() == zero["weights"]


DEAD = "kvx://127.0.0.1:1/" + "0" * 32


def leader_of(trainer: Trainer) -> WeightCoordinator:
    leader = trainer._thread._leader
    assert leader is not None
    return leader


def test_a_wait_says_why_no_instance_came() -> None:
    with Trainer(
        shards(0, 1), dict, rank=0, world_size=1, cluster_key=KEY, receivers=[DEAD], fabrics=["tcp"]
    ) as lead:
        wait_until(lambda: leader_of(lead)._dialed[DEAD] is not None)
        with pytest.raises(DeadlineExceeded) as failed:
            lead.wait_for(1, 0.01)
        cause = failed.value.__cause__
        assert isinstance(cause, ConnectFailed)
        assert str(failed.value) == f"after 0.01 s 0 of 1 instances are connected: {cause}"
        assert "127.0.0.1:1" in str(cause)


def test_a_push_can_be_repeated_after_its_wait_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    model = torch.nn.Linear(4, 2)
    serving = _Serving(holdings=weights.state_of(model).holdings)
    with serving:
        with pytest.raises(DeadlineExceeded, match="0 of 1 instances are connected"):
            weights.push(model, 1, wait_seconds=0.01, fabrics=["local"])
        push = weights.push(model, 1, receivers=[serving.address], fabrics=["local"])
        assert push.result(60).state == "committed"
        weights.forget(model)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"receivers": DEAD}, "receivers is 'kvx://127.*pass a list"),
        ({"receivers": ["nowhere"], "wait_seconds": float("inf")}, "nowhere"),
        ({"wait_seconds": 0}, "the wait for instances is 0 s; use more than 0"),
    ],
)
def test_arguments_of_a_wait_are_checked(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], text: str
) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    with pytest.raises(InvalidArgument, match=text):
        weights.push(torch.nn.Linear(4, 2), 1, fabrics=["local"], **arguments)


def test_a_push_with_another_cluster_key_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", "x" * 32)
    model = torch.nn.Linear(40, 24)
    serving = _Serving(holdings=weights.state_of(model).holdings)
    with serving, pytest.raises(AuthenticationFailed):
        weights.push(model, 1, receivers=[serving.address], wait_seconds=1e6, fabrics=["local"])


def test_a_receiver_with_another_key_does_not_wait_for_the_coordinator(
    trainers: list[Trainer],
) -> None:
    async def join() -> None:
        async with (
            Engine(cluster_key="x" * 32, fabrics=["local"]) as engine,
            WeightReceiver(engine, shards(0, 1), instance_id="i0") as receiver,
        ):
            await receiver.join(trainers[0].coordinator, timeout=1e6)

    with pytest.raises(AuthenticationFailed):
        asyncio.run(join())


def test_a_wait_names_the_ranks_that_are_missing() -> None:
    holdings = shards(0, 2)
    with Trainer(holdings, dict, rank=0, world_size=3, cluster_key=KEY, fabrics=["local"]) as lead:

        async def join() -> str:
            async with (
                Engine(cluster_key=KEY, fabrics=["local"]) as engine,
                WeightReceiver(engine, holdings, instance_id="i0", rank=1, ranks=3) as receiver,
            ):
                await receiver.join(lead.coordinator)
                await eventually(lambda: bool(list(leader_of(lead)._members.incomplete())))
                with pytest.raises(DeadlineExceeded) as failed:
                    await asyncio.to_thread(lead.wait_for, 2, 0.01)
                return str(failed.value)

        assert asyncio.run(join()) == (
            "after 0.01 s 0 of 2 instances are connected: training rank 1 has not joined; training "
            "rank 2 has not joined; 'i0' has 3 ranks, and lacks 0, 2"
        )


def test_rank_0_hosts_the_coordinator() -> None:
    with pytest.raises(InvalidArgument, match="training rank 1 has coordinator=None"):
        Trainer(shards(0, 1), dict, rank=1, world_size=2, cluster_key=KEY)
