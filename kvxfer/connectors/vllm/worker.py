"""The worker side: sends and receives according to each step's plan, and reports the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvxfer.connectors.engine_blocks import EngineBlocks
from kvxfer.connectors.vllm.agent import Agent
from kvxfer.connectors.vllm.ended import DELIVERED, Ended
from kvxfer.connectors.vllm.forward_progress import ForwardProgress, Step
from kvxfer.connectors.vllm.kv_events import CacheChanges
from kvxfer.connectors.vllm.plan import Receive, Send, StepPlan, TransferParams
from kvxfer.connectors.vllm.prompt_blocks import NULL_BLOCK, BlockTable
from kvxfer.engine import Watcher
from kvxfer.errors import EngineClosed, InvalidArgument, KvxferError, TransferCancelled
from kvxfer.kv.block_pool import BlockIds
from kvxfer.kv.blocks import ABSENT
from kvxfer.kv.prefill_session import PrefillSession

logger = logging.getLogger(__name__)

# A session begins or is cancelled within milliseconds, or within the peer timeout if a peer is
# frozen; a loop that does not answer for this long is broken.
LOOP_SECONDS: Final = 10.0
_UNCHANGED: Final = CacheChanges()


@dataclass(slots=True)
class Results:
    """The transfers that ended since the last step."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    """Includes those that failed."""
    failed: set[str] = field(default_factory=set)
    ended: list[Ended] = field(default_factory=list)
    """Data for the metrics."""


@dataclass(slots=True)
class _Outgoing:
    send: Send
    """The step with which it began."""
    blocks: EngineBlocks
    session: PrefillSession | None = None
    """The session; None before it is opened, and if that failed. Loop only."""
    written: int = 0
    """Blocks of each layer whose writes are submitted."""
    whole: bool = False
    ended: bool = False
    """Whether nothing of it is under way any more."""


class TransferWorker:
    """The transfers of one worker process.

    The engine's thread calls everything here; coroutines run on the agent's loop, and record under
    a lock what ended. Every transfer ends when its lease expires, at the latest.

    Nothing here raises: an error in vLLM's step would end the engine. If the agent does not answer
    or has ended, all transfers fail, and so do later ones; the engine continues.

    `stream` returns the CUDA stream of the forward; None if the cache is in host memory. Blocks are
    sent once the stream has computed them, and offered once it has done the work queued before.
    """

    def __init__(
        self, agent: Agent, layers: Sequence[str], stream: Callable[[], Any] | None = None
    ) -> None:
        self._agent = agent
        self._num_layers = len(layers)
        self._stream = stream
        self._progress = ForwardProgress(agent.watcher, layers, stream)
        self._offers: Watcher | None = None  # on a GPU only
        self._offered = 0  # the value that it will reach
        self._plan = StepPlan()
        self._sends: dict[str, _Outgoing] = {}
        self._in_order = asyncio.Lock()  # orders the work on sends; loop only
        self._finished: set[str] = set()  # requests whose blocks wait for their send
        self._lock = threading.Lock()
        self._results = Results()
        self._news = threading.Event()  # something has ended
        self._receiving: dict[str, asyncio.Task[None]] = {}  # loop only
        self._aborted: set[str] = set()  # receives whose request has ended; loop only
        self._expected: set[str] = set()  # requests whose receive was begun and has not ended

    def begin_step(self, plan: StepPlan) -> None:
        """Begins a step, before its forward. When this returns, nothing reads preempted blocks."""
        self._plan = plan
        preempted = [
            self._sends.pop(request_id)
            for request_id in plan.preempted
            if request_id in self._sends
        ]
        begun = [_outgoing(send) for send in plan.sends if send.request_id not in self._sends]
        self._sends |= {outgoing.send.request_id: outgoing for outgoing in begun}
        self._guarded(lambda: self._begin_step(plan, preempted, begun))

    def _begin_step(
        self, plan: StepPlan, preempted: Sequence[_Outgoing], begun: Sequence[_Outgoing]
    ) -> None:
        if preempted:
            how = "prefill has preempted the request"
            self._agent.run(self._cancel_sends(preempted, how), LOOP_SECONDS)
        for request_id, how in plan.cancels.items():
            outgoing = self._sends.get(request_id)
            if outgoing is not None:
                self._agent.spawn(self._cancel_sends([outgoing], how))
            else:
                self._agent.spawn(self._cancel_receive(request_id))
        if plan.cached != _UNCHANGED:
            self._agent.cached(plan.cached)
        if plan.counted is not None:
            self._agent.counted = plan.counted
        for params, how in plan.unserved:
            self._agent.spawn(self._decline(params, how))
        for params in plan.waiting:
            self._agent.spawn(self._keep(params))
        for params, why in plan.releases:
            self._agent.spawn(self._release(params, why))
        writes = []
        for send in plan.sends:
            outgoing = self._sends[send.request_id]
            outgoing.blocks.fill(_ids(send.block_ids))
            if outgoing.written < send.until:
                outgoing.written = send.until
                writes.append((outgoing, send.until))
        if plan.sends:
            step = self._progress.begin()
            self._agent.spawn(self._begin_sends(begun, writes, step))

    def save_layer(self, name: str) -> None:
        """Marks a layer of this step, and every layer before it, as computed or queued in the
        stream."""
        if not self._plan.sends:
            return
        if self._stream is None:
            self._progress.computed(name)
        else:
            self._guarded(lambda: self._progress.computed(name))  # CUDA may fail

    def end_forward(self) -> None:
        """Marks all layers of this step as computed or queued in the stream."""
        if self._plan.sends:
            self._guarded(self._end_forward)

    def _end_forward(self) -> None:
        self._progress.end()
        whole = []
        for send in self._plan.sends:
            outgoing = self._sends[send.request_id]
            if send.until == send.num_blocks and not outgoing.whole:
                outgoing.whole = True
                whole.append(outgoing)
        if whole:
            self._agent.spawn(self._finish_sends(whole))

    def start_receives(self) -> None:
        """Offers the blocks of the prompts that this step receives."""
        receives, self._plan.receives = self._plan.receives, []
        self._expected |= {receive.request_id for receive in receives}
        self._guarded(lambda: self._begin_receives(receives))

    def _begin_receives(self, receives: Sequence[Receive]) -> None:
        offered = self._offered
        if receives and self._stream is not None:
            # Kernels queued before may zero these blocks, or write them for an earlier request.
            self._offers = self._offers or self._agent.watcher()
            self._offers.add_on(self._stream())
            self._offered = offered = offered + 1
        for receive in receives:
            self._agent.spawn(self._receive(receive, offered))

    def results(self, finished: Collection[str]) -> Results:
        """Returns what ended; `finished` are requests that have ended since the last step.

        In a step that computes nothing, this briefly waits for a transfer to end.
        """
        self._finished |= self._sends.keys() & set(finished)
        self._guarded(self._require_answers)
        pending = self._expected or self._sends
        if pending and self._plan.idle_seconds and not self._agent.lost:
            self._news.wait(self._plan.idle_seconds)
        self._news.clear()
        lost = self._agent.lost
        with self._lock:
            results, self._results = self._results, Results()
        results.received &= self._expected
        results.failed &= self._expected
        self._expected -= results.received
        if lost:
            results.received |= self._expected
            results.failed |= self._expected
            results.ended += [Ended("receive", EngineClosed.code) for _ in self._expected]
            self._expected.clear()
        for request_id in self._finished:
            outgoing = self._sends[request_id]
            if outgoing.ended or lost:
                results.sent.add(request_id)
                del self._sends[request_id]
                if not outgoing.ended:
                    outgoing.ended = True
                    results.ended.append(Ended("send", EngineClosed.code))
        self._finished -= results.sent
        return results

    def suspend(self) -> None:
        """Ends all transfers before the cache's memory is released: nothing reads or writes it when
        this returns."""
        self._guarded(lambda: self._agent.run(self._agent.suspend(), LOOP_SECONDS))

    def resume(self) -> None:
        """Allows transfers again, once the cache's memory is restored."""
        self._guarded(lambda: self._agent.run(self._agent.resume(), LOOP_SECONDS))

    def _require_answers(self) -> None:
        waits = self._expected or self._sends
        if waits and not self._agent.answers(LOOP_SECONDS, self._agent.clock.monotonic()):
            raise TimeoutError(f"the loop of the agent has done nothing for {LOOP_SECONDS:g} s")

    def _guarded(self, step: Callable[[], None]) -> None:
        """Takes a step; if that fails, all transfers end, but not the engine."""
        if self._agent.lost:
            return
        try:
            step()
        except Exception:
            self._end()

    def _end(self) -> None:
        logger.exception("the transfers of this worker have ended: it computes without them")
        self._agent.abandon()

    async def _begin_sends(
        self, begun: Sequence[_Outgoing], writes: Sequence[tuple[_Outgoing, int]], step: Step
    ) -> None:
        """Submits the blocks that a step completes: layer by layer, they leave when computed."""
        try:
            async with self._in_order:
                for outgoing in begun:
                    await self._open(outgoing)
                for layer in range(self._num_layers):
                    for outgoing, until in writes:
                        if outgoing.session is not None:
                            with contextlib.suppress(KvxferError):  # _watch() reports it
                                outgoing.session.write_layer(layer, until, after=step.after(layer))
        except Exception:
            self._end()

    async def _finish_sends(self, whole: Sequence[_Outgoing]) -> None:
        async with self._in_order:
            sessions = [(each.session, each.send.digest) for each in whole if each.session]
        await asyncio.gather(
            *(session.finish(digest) for session, digest in sessions),
            return_exceptions=True,  # _watch() reports it
        )

    async def _cancel_sends(self, sends: Sequence[_Outgoing], why: str) -> None:
        """Cancels sends. Nothing of them is under way when this returns."""
        async with self._in_order:
            sessions = [each.session for each in sends if each.session]
        await asyncio.gather(*(session.cancel(why) for session in sessions))

    async def _open(self, outgoing: _Outgoing) -> None:
        send = outgoing.send
        try:
            outgoing.session = await self._agent.endpoint.prefill_session(
                send.params.ticket, outgoing.blocks, adapter=send.adapter
            )
        except KvxferError as error:
            self._not_sent(outgoing, error)
        else:
            self._agent.spawn(self._watch(outgoing, outgoing.session))

    async def _decline(self, params: TransferParams, how: str) -> None:
        try:
            self._agent.endpoint.decline(params.ticket, how)
        except KvxferError as error:
            logger.info("nothing to decline: %s", error)

    async def _release(self, params: TransferParams, why: str) -> None:
        try:
            await self._agent.endpoint.release(params.ticket, params.addresses, why)
        except KvxferError as error:
            logger.info("prefill keeps its blocks until its lease ends: %s", error)

    async def _keep(self, params: TransferParams) -> None:
        try:
            await self._agent.endpoint.keep(params.ticket, params.addresses)
        except KvxferError as error:
            logger.info("prefill keeps its blocks no longer than its lease: %s", error)

    async def _watch(self, outgoing: _Outgoing, session: PrefillSession) -> None:
        begun = self._agent.clock.monotonic()
        try:
            await session.wait()
        except asyncio.CancelledError:  # the agent ends
            self._sent(outgoing, Ended("send", EngineClosed.code))
            raise
        except KvxferError as error:
            self._not_sent(outgoing, error)
        else:
            self._sent(outgoing, self._delivered("send", session.nbytes, begun))

    def _not_sent(self, outgoing: _Outgoing, error: KvxferError) -> None:
        logger.warning("request %s is not sent: %s", outgoing.send.request_id, error)
        self._sent(outgoing, Ended("send", error.code))

    def _sent(self, outgoing: _Outgoing, ended: Ended) -> None:
        """Records the end of a send, when nothing of it is under way any more."""
        if not outgoing.ended:
            self._note(ended)
        outgoing.ended = True
        self._news.set()

    async def _receive(self, receive: Receive, offered: int) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (a coroutine runs in a task)
        self._receiving[receive.request_id] = task
        begun = self._agent.clock.monotonic()
        failed = True
        ended = Ended("receive", KvxferError.code)
        try:
            await self._may_offer(receive, offered)
            ended = self._delivered("receive", await self._take(receive), begun)
            failed = False
        except asyncio.CancelledError:
            # If the request has ended, its blocks are freed unread; otherwise the agent ends.
            failed = receive.request_id not in self._aborted
            ended = Ended("receive", EngineClosed.code if failed else TransferCancelled.code)
        except KvxferError as error:
            logger.warning("request %s is not received: %s", receive.request_id, error)
            ended = Ended("receive", error.code)
        except Exception:
            logger.exception("request %s is not received", receive.request_id)
        finally:
            del self._receiving[receive.request_id]
            self._aborted.discard(receive.request_id)
            with self._lock:
                self._results.received.add(receive.request_id)
                if failed:
                    self._results.failed.add(receive.request_id)
                self._results.ended.append(ended)
            self._news.set()

    def _delivered(self, direction: str, nbytes: int, begun: float) -> Ended:
        layout = self._agent.endpoint.layout
        # A block id covers the layers of one group.
        blocks = nbytes * layout.num_groups // layout.stack_bytes
        return Ended(direction, DELIVERED, blocks, nbytes, self._agent.clock.monotonic() - begun)

    def _note(self, ended: Ended) -> None:
        with self._lock:
            self._results.ended.append(ended)

    async def _may_offer(self, receive: Receive, offered: int) -> None:
        """Returns once no kernel of the stream can write the blocks any more."""
        if self._offers is None:
            return
        try:
            await self._agent.reached(self._offers, offered)
        except asyncio.CancelledError:
            if receive.request_id in self._aborted:
                self._agent.spawn(self._release(receive.params, "its request was aborted"))
            raise
        except KvxferError as error:
            self._agent.spawn(self._release(receive.params, str(error)))
            raise

    async def _take(self, receive: Receive) -> int:
        """Receives a prompt and returns the number of bytes."""
        params = receive.params
        opening = asyncio.ensure_future(
            self._agent.endpoint.decode_session(
                params.ticket,
                params.addresses,
                EngineBlocks(_ids(receive.block_ids)),
                first_block=receive.first_block,
                prompt_digest=receive.digest,
                adapter=receive.adapter,
            )
        )
        try:
            session = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Prefill learns of the abort only once it has the OFFER, and then need not wait for it.
            with contextlib.suppress(KvxferError):
                await (await opening).cancel("its request was aborted")
            raise
        async with session:
            digest = await session.wait()
            if digest != receive.digest:
                raise InvalidArgument(
                    "prefill computed another prompt; send the same request to both workers"
                )
            session.take()
            return session.nbytes

    async def _cancel_receive(self, request_id: str) -> None:
        task = self._receiving.get(request_id)
        if task is not None:
            self._aborted.add(request_id)
            task.cancel()


def _ids(table: BlockTable) -> BlockIds:
    ids = np.array(table, dtype=np.int32)
    ids[ids == NULL_BLOCK] = ABSENT
    return ids


def _outgoing(send: Send) -> _Outgoing:
    return _Outgoing(send, EngineBlocks(send.num_blocks, len(send.block_ids)))
