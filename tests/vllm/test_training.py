"""A training job updates two engines at once: FSDP over four ranks, a live vLLM with two ranks, and
two ranks of the reference engine. Each answer is that of one version, computed afresh."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvxfer.errors import RequestAborted
from kvxfer.reference.checkpoint import load_config, load_weights
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.tensor_parallel.model import TensorParallelModel
from kvxfer.reference.tensor_parallel.runner import GroupRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weight_receiver import Receivers
from verify.processes.programs import Server, free_port
from verify.processes.vllm.servers import VLLM_PYTHON, vllm
from verify.processes.weights.training import TrainingJob

from .conftest import CLUSTER_KEY, ask

pytestmark = [pytest.mark.native, pytest.mark.timeout(1800)]

ENVIRONMENT = {"KVXFER_CLUSTER_KEY": CLUSTER_KEY, "VLLM_SERVER_DEV_MODE": "1"}
PROMPT = list(range(40, 200, 3))
TOKENS = 8
VERSIONS = 3


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingJob]:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", CLUSTER_KEY)
    with TrainingJob(tmp_path, python=VLLM_PYTHON, layers=2) as started:
        yield started


@pytest.fixture
def server(job: TrainingJob, tmp_path: Path) -> Iterator[Server]:
    """A vLLM with the weights before the first step."""
    with vllm(
        "inference",
        tmp_path,
        job.save(tmp_path / "0"),
        "--weight-transfer-config",
        '{"backend": "kvxfer"}',
        "--tensor-parallel-size",
        "2",
        variables=ENVIRONMENT,
    ) as started:
        started.serves("/health")
        yield started


def afresh(checkpoint: Path) -> list[int]:
    """Returns the tokens that Hugging Face's model and the reference engine both answer, each
    loaded anew."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    said = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    tokens = [int(token) for token in said[0, len(PROMPT) :]]
    config = load_config(checkpoint)
    loaded = LlamaModel(config, load_weights(checkpoint, config))
    runner = ModelRunner(loaded, ByteTokenizer(), PagedKvCache(config, 16, 16))
    assert runner.generate(PROMPT, TOKENS, ignore_eos=True) == tokens
    return tokens


def of_vllm(server: Server) -> tuple[str, list[int]]:
    """Returns how the answer of vLLM ended, and its tokens."""
    said = ask(server, PROMPT)
    assert said.is_success, said.text
    [choice] = said.json()["choices"]
    return str(choice["finish_reason"]), list(choice["token_ids"])


class Asking:
    """Clients that ask both engines all the time."""

    def __init__(self, server: Server, group: GroupRunner) -> None:
        self.answers: list[tuple[str, list[int]]] = []
        """The answers of both: how each ended, and its tokens."""
        self._server, self._group = server, group

    async def __aenter__(self) -> Asking:
        self._tasks = [asyncio.create_task(self._vllm()), asyncio.create_task(self._reference())]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    _stopping = False

    async def _vllm(self) -> None:
        while not self._stopping:
            self.answers.append(await asyncio.to_thread(of_vllm, self._server))

    async def _reference(self) -> None:
        while not self._stopping:
            try:
                said = await self._group.generate(PROMPT, TOKENS, ignore_eos=True)
            except RequestAborted:
                continue
            assert len(said.spans) == 1, said.spans
            self.answers.append(("length", said.tokens))


@pytest.mark.parametrize(("mode", "policy"), [("wait", "drain"), ("abort", "abort")])
async def test_each_version_is_served_as_it_was_trained(
    job: TrainingJob, server: Server, tmp_path: Path, mode: str, policy: str
) -> None:
    port = free_port()
    config = load_config(tmp_path / "0")
    receivers = Receivers(
        config=config,
        instance_id="reference",
        cluster_key=CLUSTER_KEY,
        coordinator=f"kvx://127.0.0.1:{port}/{'0' * 32}",
    )
    tokens = [afresh(tmp_path / "0")]
    with TensorParallelModel(
        config,
        functools.partial(load_weights, tmp_path / "0", config),
        ranks=2,
        num_blocks=64,
        block_size=16,
        staging=receivers,
    ) as model:
        async with GroupRunner(model, ByteTokenizer()) as group:
            await asyncio.to_thread(
                job.connect_vllm, server.url, port=port, instances=2, mode=mode, policy=policy
            )
            for version in range(1, VERSIONS + 1):
                await asyncio.to_thread(job.step)
                async with Asking(server, group) as asking:
                    report: dict[str, Any] = await asyncio.to_thread(job.send_to_vllm, version)
                states = {each["instance_id"]: each["state"] for each in report["instances"]}
                assert set(states.values()) == {"committed"}, report
                assert len(states) == 2
                checkpoint = await asyncio.to_thread(job.save, tmp_path / str(version))
                tokens.append(await asyncio.to_thread(afresh, checkpoint))
                before, after = tokens[-2:]
                assert before != after
                assert await asyncio.to_thread(of_vllm, server) == ("length", after)
                said = await group.generate(PROMPT, TOKENS, ignore_eos=True)
                assert (said.tokens, said.weights_version) == (after, version)
                for reason, found in asking.answers:
                    if reason == "abort":
                        assert mode == "abort"
                        assert found == before[: len(found)]
                    else:
                        assert found in (before, after)
                served = httpx2.get(server.url + "/weight_info", timeout=30).json()
                assert served["weight_version"] == str(version)
