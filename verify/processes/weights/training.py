"""Drives a training job: starts it, and makes it train, push and save."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from verify.processes.worker import Event, WorkerProcess

_ANSWER_SECONDS: Final = 120.0
_REPORT_SECONDS: Final = 300.0
_START_SECONDS: Final = 300.0

KEY: Final = "the key of a training job"


class TrainingJob(WorkerProcess):
    """A job of training ranks with a tiny Llama, FSDP over gloo. Its results follow from the seed.
    One thread at a time. Raises AssertionError if a rank fails at a command."""

    def __init__(self, folder: Path, *, world_size: int = 4, python: str = "", **job: Any) -> None:
        """Starts the job. Returns once it is ready. `job` has the members of trainer_rank.Job;
        `python` is vLLM's Python, for connect_vllm()."""
        store = Path(tempfile.mkdtemp(dir=folder)) / "store"
        options = {"store": str(store), "world_size": world_size, **job}
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
        self.world_size = world_size
        super().__init__(
            "verify.processes.weights.job",
            "training job",
            json.dumps(options),
            environment=quiet,
            python=python,
        )
        self.pids: list[int] = self._ready.result(_START_SECONDS)["pids"]

    def do(self, do: str, *, ranks: Sequence[int] | None = None, **arguments: Any) -> list[Event]:
        """Sends a command to all ranks, or to `ranks`. Returns the answer of each."""
        chosen = list(range(self.world_size) if ranks is None else ranks)
        answers: list[Event] = self.begin(do, ranks=chosen, **arguments).result(_ANSWER_SECONDS)[
            "ranks"
        ]
        failed = [each for each in answers if "error" in each]
        assert not failed, self.failed(f"did not {do}: {failed}")
        return answers

    def step(self, count: int = 1) -> float:
        """Trains. Returns the loss of rank 0."""
        return float(self.do("step", count=count)[0]["loss"])

    def connect(self, key: str = KEY, receivers: Sequence[str] = (), **arguments: Any) -> str:
        """Opens the Trainer of each rank. Returns the coordinator's address. `arguments` are those
        of trainer_rank.TrainerRank.connect."""
        first = self.do("connect", ranks=[0], key=key, receivers=list(receivers), **arguments)
        address = str(first[0]["coordinator"])
        others = range(1, self.world_size)
        self.do("connect", ranks=others, key=key, coordinator=address, **arguments)
        return address

    def connect_vllm(self, server: str, **arguments: Any) -> None:
        """Opens, at each rank, vLLM's trainer engine of the backend `kvxfer`. `arguments` are those
        of trainer_rank.TrainerRank.connect_vllm."""
        self.do("connect_vllm", server=server, **arguments)

    def send_to_vllm(self, version: int) -> Event:
        """Sends the weights from all ranks. Returns the report of rank 0."""
        return dict(self.do("send_to_vllm", version=version)[0]["report"])

    def wait_for(self, instances: int, seconds: float = 60.0) -> None:
        """Waits until `instances` instances have joined."""
        self.do("wait", ranks=[0], instances=instances, seconds=seconds)

    def begin_push(self, version: int) -> Future[Event]:
        """Begins a push. The future is done once all ranks have read their weights. event("pushed")
        reports the end."""
        return self.begin("push", ranks=list(range(self.world_size)), version=version)

    def push(self, version: int) -> Event:
        """Pushes a version. Returns the report of rank 0, or its error as {"error": …, "code":
        …}."""
        self.do("push", version=version)
        return self.pushed()

    def pushed(self, ranks: int | None = None) -> Event:
        """Waits until `ranks` ranks (by default all) report the end of the current push. Returns
        the report of the lowest of them."""
        ends = [
            self.event("pushed").result(_REPORT_SECONDS) for _ in range(ranks or self.world_size)
        ]
        end = min(ends, key=lambda each: int(each["rank"]))
        return dict(end.get("report", end))

    def save(self, folder: Path) -> Path:
        """Saves the weights as a checkpoint."""
        self.do("save", folder=str(folder))
        return folder

    def quit(self) -> None:
        """Ends the job in good order."""
        self.tell("quit")
        self.ends(_ANSWER_SECONDS)

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a rank: SIGKILL, or SIGSTOP to freeze it."""
        os.kill(self.pids[rank], number)
