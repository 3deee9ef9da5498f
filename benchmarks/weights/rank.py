"""The common code of the benchmark's training and inference ranks.

The ways to move weights from training ranks to inference ranks:

- `update`: kvxfer's weight update, from push() until all instances serve it
- `raw`: as many bytes between the same ranks by the engine's writes, one contiguous write each
- `gather`: by gloo, each parameter gathered at rank 0, and broadcast to the inference ranks
- `send`: by gloo, the same pieces as the update's by isend and irecv, all under way at once
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.weights.model import Parameter
from kvxfer.bench.settings import PEER_TIMEOUT_SECONDS
from kvxfer.engine import Engine
from kvxfer.loop_thread import LoopThread

WAYS: Final = ("update", "raw", "gather", "send")
SENDERS: Final = 4
RECEIVERS: Final = 2
WORLD: Final = SENDERS + RECEIVERS
"""The ranks in gloo: the senders first."""
SECONDS: Final = 300.0
"""The most seconds for one transfer by any way, or to connect."""


class WrongBytes(AssertionError):
    """The received bytes differ from the sent bytes."""


class Loop(LoopThread):
    """The asynchronous part of a rank; `stack` ends with it."""

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as self.stack:
            self._started.set_result(None)
            await self._closing.wait()


class Rank(abc.ABC):
    """One process of the benchmark. All ranks call the same methods in the same order."""

    def __init__(self, rank: int, model: list[Parameter], key: str) -> None:
        self._rank, self._model, self._key = rank, model, key
        self._trainers = dist.new_group(list(range(SENDERS)))
        self._broadcast = dist.new_group([0, *range(SENDERS, WORLD)])
        most = max(torch.Size(each.shape).numel() for each in model)
        self._whole = torch.empty(most, dtype=torch.bfloat16)
        """Memory for one gathered parameter at a time."""
        self._fabric, self._digests = "", False
        self.stage_seconds = 0.0
        """The seconds of rank 0's last update, from the order to write until its end."""

    @contextlib.contextmanager
    def connected(self, fabric: str, digests: bool) -> Iterator[None]:
        """Opens engines and members of updates over one fabric."""
        self._fabric, self._digests = fabric, digests
        self._loop = Loop()
        self._loop.begin()
        try:
            self._connect()
            yield
        finally:
            self._disconnect()
            self._loop.close()

    def move(self, way: str) -> None:
        """Does this rank's part of one transfer."""
        ways = {
            "update": self._update,
            "raw": self._raw,
            "gather": self._gather,
            "send": self._send,
        }
        ways[way]()

    @abc.abstractmethod
    def blank(self, way: str) -> None:
        """Clears the weights that arrived by this way."""

    @abc.abstractmethod
    def check(self, way: str) -> None:
        """Raises WrongBytes unless all weights have arrived by this way."""

    @abc.abstractmethod
    def _connect(self) -> None: ...

    @abc.abstractmethod
    def _disconnect(self) -> None: ...

    @abc.abstractmethod
    def _update(self) -> None: ...

    @abc.abstractmethod
    def _raw(self) -> None: ...

    @abc.abstractmethod
    def _gather(self) -> None: ...

    @abc.abstractmethod
    def _send(self) -> None: ...

    async def _engine(self, use: str) -> Engine:
        """Starts an engine that ends with the loop."""
        engine = Engine(
            cluster_key=self._key,
            name=f"{use} {self._rank}",
            fabrics=[self._fabric],
            peer_timeout=PEER_TIMEOUT_SECONDS,
        )
        return await self._loop.stack.enter_async_context(engine)


def all_say(value: Any) -> list[Any]:
    """Returns the values of all ranks."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, as gloo does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


def tag_of(parameter: int, sender: int, receiver: int) -> int:
    return (parameter * SENDERS + sender) * RECEIVERS + receiver
