"""One rank of a training job: a tiny Llama, sharded by FSDP, that executes commands."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from kvxfer.errors import KvxferError
from kvxfer.weights.torch_state import state_of
from kvxfer.weights.trainer import Push, Trainer
from kvxfer.weights.transfer.settings import UpdateSettings
from verify.processes.vllm.tiny_llama import VOCABULARY, config_of, save_tokenizer

Event: TypeAlias = dict[str, Any]

_COLLECTIVE: Final = timedelta(seconds=60)
_READ_SECONDS: Final = 60.0
_RESULT_SECONDS: Final = 240.0
_BATCH: Final = (2, 24)


class Job(NamedTuple):
    """The settings of all ranks of a job."""

    store: Path
    """The file at which the ranks meet. It does not exist yet."""
    world_size: int
    seed: int = 0
    rate: float = 0.05
    """The optimizer's learning rate. Its first step changes each weight by about this much. Weights
    have a standard deviation of 0.2, so tokens differ after the step."""
    dtype: str = "float32"
    """The dtype in which weights are sent and saved. The optimizer uses float32."""
    layers: int = 4


class TrainerRank:
    """The commands of a rank. `step` and `save` must go to all ranks."""

    def __init__(self, job: Job, rank: int, tell: Callable[[Event], None]) -> None:
        self._job, self._rank, self._tell = job, rank, tell
        torch.set_num_threads(1)
        init_process_group(
            "gloo",
            init_method=f"file://{job.store}",
            rank=rank,
            world_size=job.world_size,
            timeout=_COLLECTIVE,
        )
        torch.manual_seed(job.seed)
        self._model: nn.Module = LlamaForCausalLM(config_of(job.layers))
        for module in self._model.model.layers:
            fully_shard(module)
        fully_shard(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=job.rate)
        self._steps = 0
        self._trainer: Trainer | None = None
        self._vllm: Any = None

    def step(self, count: int = 1) -> Event:
        """Trains on random tokens that follow from seed, rank and step."""
        for _ in range(count):
            self._steps += 1
            seed = (self._job.seed << 32) + (self._rank << 24) + self._steps
            tokens = torch.randint(
                VOCABULARY, _BATCH, generator=torch.Generator().manual_seed(seed)
            )
            loss = self._model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return {"steps": self._steps, "loss": float(loss)}

    def connect(
        self,
        key: str,
        coordinator: str | None = None,
        settings: Event | None = None,
        options: Event | None = None,
        **trainer: Any,
    ) -> Event:
        """Opens this rank's Trainer; `options` are the engine's, the rest the Trainer's."""
        state = state_of(self._model, sent_as=lambda name, dtype: self._job.dtype)
        self._trainer = Trainer(
            state.holdings,
            state.staged,
            rank=self._rank,
            world_size=self._job.world_size,
            cluster_key=key,
            coordinator=coordinator,
            settings=UpdateSettings(**(settings or {})),
            **trainer,
            **(options or {}),
        )
        return {"coordinator": self._trainer.coordinator}

    def connect_vllm(
        self, server: str, port: int, instances: int, mode: str = "wait", policy: str = "drain"
    ) -> Event:
        """Opens this rank's engine of vLLM's weight transfer. The coordinator listens at `port`.
        `mode` is the way in which vLLM is paused, `policy` the way in which other instances handle
        requests."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from kvxfer.connectors.vllm.weight_transfer import KvxferTrainerInitInfo, PausingClient
        from kvxfer.connectors.vllm.weight_transfer.plugin import register
        from kvxfer.connectors.vllm.weight_transfer.trainer import StateSource

        register()
        state = state_of(self._model, sent_as=lambda name, dtype: self._job.dtype)
        info = KvxferTrainerInitInfo(
            rank=self._rank,
            world_size=self._job.world_size,
            instances=instances,
            settings=UpdateSettings(policy=policy),  # type: ignore[arg-type]
            options={"port": port} if self._rank == 0 else {},
        )
        client = PausingClient(server, mode=mode)  # type: ignore[arg-type]
        self._vllm = WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=StateSource(state)
        )
        return {}

    def send_to_vllm(self, version: int) -> Event:
        """Pushes with vLLM's engine. Returns once all instances serve the update."""
        report = self._vllm.send_weights(version)
        return {"report": msgspec.to_builtins(report)}

    def wait(self, instances: int, seconds: float) -> Event:
        """Waits, at rank 0, until `instances` instances have joined."""
        self._connected.wait_for(instances, seconds)
        return {}

    def push(self, version: int) -> Event:
        """Begins a push. Returns once the weights have been read; then a step may follow. The event
        "pushed" has the report or the error."""
        push = self._connected.push(version)
        threading.Thread(target=self._await, args=(push,), daemon=True).start()
        push.read(_READ_SECONDS)
        return {"version": version}

    def _await(self, push: Push) -> None:
        told: Event = {"event": "pushed", "version": push.version}
        try:
            report = push.result(_RESULT_SECONDS)
        except KvxferError as error:
            self._tell({**told, **_failure(error)})
        else:
            self._tell({**told, "report": msgspec.to_builtins(report)})

    def save(self, folder: str) -> Event:
        """Saves the current weights, at rank 0, as a checkpoint that vLLM and transformers load."""
        dtype = getattr(torch, self._job.dtype)
        whole = {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().to(dtype)
            for name, each in self._model.state_dict().items()
        }
        if self._rank == 0:
            model = LlamaForCausalLM(config_of(self._job.layers)).to(dtype)
            model.load_state_dict(whole)
            model.save_pretrained(folder)
            save_tokenizer(Path(folder))
        torch.distributed.barrier()
        return {"folder": folder}

    def close(self) -> Event:
        """Ends the trainer. Another one may be connected after it."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None
        if self._vllm is not None:
            self._vllm.shutdown()
        self._vllm = None
        return {}

    @property
    def _connected(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the rank has no trainer; send it `connect` first")
        return self._trainer


def serve(job: Job, rank: int, driver: Connection) -> None:
    """Executes the driver's commands until "quit" or the end of the driver."""
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            driver.send({"rank": rank, **event})

    ours = TrainerRank(job, rank, tell)
    tell({"event": "ready"})
    while True:
        try:
            command = driver.recv()
        except EOFError:
            return
        ident, do = command.pop("id", None), command.pop("do")
        if do == "quit":
            break
        try:
            answer = getattr(ours, do)(**command)
        except Exception as error:
            traceback.print_exc()
            answer = _failure(error)
        tell({"id": ident, **answer})
    ours.close()
    destroy_process_group()


def _failure(error: Exception) -> Event:
    code = error.code if isinstance(error, KvxferError) else type(error).__name__
    return {"error": str(error), "code": code}
