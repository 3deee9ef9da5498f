"""The scheduler side: it decides which blocks are moved for each request, and in which step.

A pure state machine over plain values: no vLLM, no network. The worker side executes the plan of
each step; all waiting is done there.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.connectors.vllm.kv_events import CacheChanges
from kvxfer.connectors.vllm.plan import Receive, Send, StepPlan, TransferParams
from kvxfer.connectors.vllm.prompt_blocks import PromptBlocks
from kvxfer.connectors.vllm.samples import EndedSamples
from kvxfer.instances import Role

logger = logging.getLogger(__name__)

SideOf = Callable[[TransferParams], Role | None]
"""The side that a ticket gives to this instance; None if it is for others or invalid."""


class Stage(enum.Enum):
    """The stage of a request with a ticket."""

    WAITING = enum.auto()  # no blocks yet
    FOLLOWING = enum.auto()  # another request with its ticket has the transfer
    SENDING = enum.auto()  # prefill: some of its steps were planned
    RECEIVING = enum.auto()  # decode: its blocks were offered
    ORDINARY = enum.auto()  # the transfer has ended, or was given up


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of one step."""

    request_id: str
    new_block_ids: Sequence[Sequence[int]]
    """Block ids of each KV cache group; empty if there are none."""
    computed_tokens: int
    """Tokens computed before the step."""
    step_tokens: int


@dataclass(slots=True)
class _Request:
    params: TransferParams
    side: Role
    prompt_tokens: int
    digest: bytes
    adapter: str = ""
    stage: Stage = Stage.WAITING
    leader: _Request | None = None
    """The request whose transfer a following one waits for."""
    block_ids: list[list[int]] = field(default_factory=list)
    planned: int = 0
    """Blocks that the steps so far complete."""
    keep_at: float = 0.0
    """The time at which prefill must next hear that the request still waits for blocks."""


class TransferScheduler:
    """The requests of one engine that have a ticket. One thread: the engine's own loop."""

    def __init__(
        self,
        blocks: PromptBlocks,
        side_of: SideOf,
        lease_seconds: float,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`lease_seconds`: how long prefill keeps a prompt that is not asked for."""
        self._blocks = blocks
        self._side_of = side_of
        self._keep_seconds = lease_seconds / 3
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._leaders: dict[str, _Request] = {}  # keys: tickets
        self._ended_leaders: EndedSamples[bool] = EndedSamples(lease_seconds, clock=clock)
        self._plan = StepPlan()

    def __len__(self) -> int:
        return len(self._requests)

    def arrived(
        self,
        request_id: str,
        params: TransferParams,
        prompt_tokens: int,
        digest: bytes,
        adapter: str = "",
    ) -> None:
        """Takes a request with a ticket. If the ticket is not for this instance, the request is an
        ordinary one. `adapter` identifies its LoRA by its content.

        Of several requests with one ticket (`n` above 1) the first has the transfer; decode's
        others wait for it, and find its blocks in the prefix cache, as do those that come after it.
        """
        side = self._side_of(params)
        if side is None:
            logger.warning("request %s: its ticket is not for this instance", request_id)
            return
        request = _Request(params, side, prompt_tokens, digest, adapter)
        leader = self._leaders.setdefault(params.ticket, request)
        if leader is not request:
            request.leader = leader
            request.stage = Stage.FOLLOWING if side is Role.DECODE else Stage.ORDINARY
        elif self._ended_leaders.of(request_id, params.ticket):
            request.stage = Stage.ORDINARY
        self._requests[request_id] = request

    def sends(self, request_id: str) -> bool:
        """True if a prompt is computed here for another instance."""
        request = self._requests.get(request_id)
        return request is not None and request.side is Role.PREFILL

    def external_tokens(self, request_id: str, computed_tokens: int) -> int | None:
        """Returns the number of tokens that come from prefill after those that are computed here;
        None if it is not known yet. No side effects."""
        request = self._requests.get(request_id)
        if request is None or request.side is Role.PREFILL:
            return 0
        if request.stage is Stage.FOLLOWING:
            return 0 if request.leader is None or request.leader.stage is Stage.ORDINARY else None
        if request.stage is not Stage.WAITING:
            return 0
        # Decode always computes the last tokens itself, so it needs what they attend to.
        return max(self._blocks.moved(request.prompt_tokens) - computed_tokens, 0)

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Takes the blocks of a request that waits for `external_tokens` tokens of its prompt."""
        request = self._requests.get(request_id)
        if request is None or request.side is Role.PREFILL or request.stage is not Stage.WAITING:
            return
        if not external_tokens:
            request.stage = Stage.ORDINARY
            self._plan.releases.append((request.params, "decode does not need it"))
            return
        request.stage = Stage.RECEIVING
        before = self._blocks.moved(request.prompt_tokens) - external_tokens
        first = before // self._blocks.block_size
        table = self._blocks.table(block_ids, request.prompt_tokens)
        self._plan.receives.append(
            Receive(
                request_id,
                request.params,
                request.digest,
                first,
                tuple(row[first:] for row in table),
                request.adapter,
            )
        )

    def sent_tokens(self, request_id: str) -> int | None:
        """Returns the tokens of the prompt if it is sent from here, else None."""
        request = self._requests.get(request_id)
        if request is None or request.stage is not Stage.SENDING:
            return None
        return request.prompt_tokens

    def received(self, request_ids: Collection[str]) -> None:
        """Notes that the transfers to these requests have ended or failed."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.stage = Stage.ORDINARY

    def step(self, scheduled: Sequence[Scheduled], preempted: Collection[str]) -> StepPlan:
        """Returns the plan of the step that computes `scheduled`."""
        for request_id in preempted:
            request = self._requests.get(request_id)
            if request is not None and request.stage is Stage.SENDING:
                self._plan.preempted.append(request_id)
                request.stage = Stage.ORDINARY
        for one in scheduled:
            request = self._requests.get(one.request_id)
            if request is not None and request.side is Role.PREFILL:
                self._plan_send(request, one)
        now = self._clock.monotonic()
        for request in self._requests.values():
            waits = request.stage is Stage.WAITING and request.side is Role.DECODE
            if waits and request.keep_at <= now:
                request.keep_at = now + self._keep_seconds
                self._plan.waiting.append(request.params)
        plan, self._plan = self._plan, StepPlan()
        return plan

    def cached(self, hashes: Iterable[int]) -> None:
        """Notes hashes of prompts that are now in the prefix cache."""
        for number in hashes:
            self._plan.cached.add(number)

    def cache_changed(self, changes: CacheChanges) -> None:
        """Notes changes of the prefix cache from vLLM's own events."""
        self._plan.cached.follow(changes)

    def finished(self, request_id: str, how: str) -> bool:
        """Ends a request. Returns True if its blocks are kept until the worker side reports that
        they are sent."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.leader is None:
            del self._leaders[request.params.ticket]
            self._ended_leaders.add(request_id, request.params.ticket, True)
        stage, request.stage = request.stage, Stage.ORDINARY  # requests that follow it see this
        if stage is Stage.SENDING:
            if request.planned < self._blocks.count(request.prompt_tokens):
                self._plan.cancels[request_id] = how
            return True
        if stage is Stage.RECEIVING:
            self._plan.cancels[request_id] = how
        elif stage is Stage.WAITING:
            of = self._plan.unserved if request.side is Role.PREFILL else self._plan.releases
            of.append((request.params, how))
        return False

    def keep(self, send: Send) -> None:
        """Passes a computed prompt to the worker side, to be fetched."""
        self._plan.sends.append(send)

    def _plan_send(self, request: _Request, one: Scheduled) -> None:
        total = self._blocks.count(request.prompt_tokens)
        if request.stage is Stage.ORDINARY or request.planned == total:
            return
        request.stage = Stage.SENDING
        request.block_ids = request.block_ids or [[] for _ in one.new_block_ids]
        for ids, new in zip(request.block_ids, one.new_block_ids, strict=False):
            ids += new
        computed = one.computed_tokens + one.step_tokens
        request.planned = min(computed // self._blocks.block_size, total)
        if computed >= self._blocks.moved(request.prompt_tokens):
            request.planned = total
        self._plan.sends.append(
            Send(
                one.request_id,
                request.params,
                request.digest,
                total,
                self._blocks.table(request.block_ids, request.prompt_tokens),
                request.planned,
                request.adapter,
            )
        )
