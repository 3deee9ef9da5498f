"""Requests over a model of several processes, with weight updates between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import KvxferError, RankLost
from kvxfer.kv import BlockPool
from kvxfer.reference.compute import ComputeThread
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.tensor_parallel.model import TensorParallelModel
from kvxfer.reference.tokens import Tokenizer
from kvxfer.reference.versions import (
    DRAIN_SECONDS,
    Admission,
    Policy,
    VersionGate,
    VersionSpan,
)
from kvxfer.reference.weight_receiver import ReceiverThread
from kvxfer.weights.transfer.staged import Staged

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generated:
    tokens: list[int]
    spans: list[VersionSpan]
    """The versions of the tokens; one span under `drain` and `abort`."""

    @property
    def weights_version(self) -> int:
        """The version of the last token."""
        return self.spans[-1].version


class GroupRunner:
    """A runner whose requests take turns, a step each. Loop only; a thread runs the model."""

    def __init__(
        self,
        model: TensorParallelModel,
        tokenizer: Tokenizer,
        *,
        policy: Policy = Policy.DRAIN,
        drain_seconds: float = DRAIN_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`model` must have been entered."""
        self._model = model
        self._runner = ModelRunner(model, tokenizer, model.cache)
        self._pool = BlockPool(model.cache.num_blocks)
        self._compute = ComputeThread()
        self._gate = VersionGate(self._compute, policy, drain_seconds, clock)
        self._updating = asyncio.Lock()

    async def __aenter__(self) -> Self:
        staging = self._model.staging
        if isinstance(staging, ReceiverThread):
            staging.commit_by(self.commit, asyncio.get_running_loop())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._compute.close()

    @property
    def weights_version(self) -> int:
        return self._gate.version

    async def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        ignore_eos: bool = False,
        weights_version: int | None = None,
    ) -> Generated:
        """Returns the greedy output of a prompt.

        Raises WrongVersion if another version than the demanded one is served, RequestAborted,
        InvalidArgument, PromptTooLong, BlockPoolExhausted and RankLost.
        """
        tokens = self._runner.encode(prompt)
        num_blocks = self._runner.blocks_for(len(tokens), max_tokens)
        async with self._gate.admit(weights_version) as admission:
            with self._pool.hold(num_blocks) as hold:
                blocks = hold.ids.tolist()
                first = await self._step(admission, lambda: self._runner.prefill(tokens, blocks))
                output = [first]
                steps = self._runner.decode(first, len(tokens), blocks, max_tokens)
                while len(output) < max_tokens and (
                    ignore_eos or not self._runner.ends(output[-1])
                ):
                    output.append(await self._step(admission, lambda: next(steps)))
            return Generated(output, admission.spans)

    async def update(self, update_id: str, policy: Policy | None = None) -> float:
        """Applies an update that every rank has staged. Returns the pause in seconds, from the last
        step before it until the first one after it could begin. Cancelling the task does not undo
        it.

        Raises NotStaged with nothing changed. All other errors end the service.
        """
        return await asyncio.shield(asyncio.create_task(self._update(update_id, policy)))

    async def commit(self, staged: Staged) -> float:
        """Applies an update as update() does, for the `WeightReceiver` of rank 0. Any failure ends
        the service, as the other ranks have committed."""
        try:
            policy = None if staged.policy is None else Policy(staged.policy)
            return await self.update(staged.update_id, policy)
        except KvxferError as error:
            self._gate.close(error)
            raise

    async def _update(self, update_id: str, policy: Policy | None) -> float:
        async with self._updating:
            staged = await self._run(lambda: self._model.pin(update_id))
            pause = await self._gate.update(lambda: self._model.apply(staged), policy)
            await self._run(lambda: self._model.applied(staged, pause))
        return pause

    async def _step(self, admission: Admission, step: Callable[[], int]) -> int:
        def checked() -> tuple[int, int]:
            version = self._model.weights_version
            admission.check(version)
            return step(), version

        token, version = await self._run(checked)
        admission.note(version)
        return token

    async def _run(self, computation: Callable[[], T]) -> T:
        try:
            return await self._compute.run(computation)
        except RankLost as error:
            self._gate.close(error)
            raise
