"""The inference side of weight updates: stages the next weights beside those that are served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, Self

from kvxfer.errors import (
    EngineError,
    InvalidArgument,
    KvxferError,
    NotStaged,
    ProtocolError,
    WeightUpdateAborted,
)
from kvxfer.own_thread import in_own_thread
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.transfer.arena import ALIGNMENT, Arena, arena_of
from kvxfer.weights.transfer.doubt import End, Outcomes, recorded, resolve
from kvxfer.weights.transfer.endings import until_ended
from kvxfer.weights.transfer.greeted import Greeted
from kvxfer.weights.transfer.links import JOIN_SECONDS, Links, logger
from kvxfer.weights.transfer.member_plan import Incoming, incoming
from kvxfer.weights.transfer.messages import (
    VERSION,
    Abort,
    Applied,
    Ask,
    Commit,
    Failed,
    Hello,
    Invite,
    JoinInference,
    Message,
    Plan,
    Planned,
    Prepare,
    Said,
    Sent,
    Tell,
    Vote,
    rank_name,
    said,
)
from kvxfer.weights.transfer.receiving import Receiving
from kvxfer.weights.transfer.service import Service
from kvxfer.weights.transfer.staged import Staged

if TYPE_CHECKING:
    from kvxfer.engine import Engine, Memory, Peer


class _Update:
    """The update, or the wave of one, that a receiver takes."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.state: Literal["receiving", "staged", "pinned"] = "receiving"
        self.receiving: Receiving | None = None
        self.task: asyncio.Task[None] | None = None
        self.staged: Staged | None = None
        self.doubt: asyncio.Task[None] | None = None


class WeightReceiver:
    """The receiver of one inference rank: an engine used for nothing else, and an arena.

    Event loop only, except `version` and `digest`. To apply a staged update, the inference engine
    pins it on all ranks of the instance (`pin()`), copies it out of `memory` on all of them between
    two steps, and reports that (`applied()`). At a leader with `commit`, the receiver calls pin()
    before it, and applied() after it. If a rank fails in between, call `broken()` and end the
    instance: it has only a part of the update.

        staged = receiver.pin(update_id)
        for name, (holding, offset, nbytes) in receiver.arena.places.items():
            box = torch.frombuffer(receiver.memory, dtype=torch.uint8)[offset : offset + nbytes]
            dtype = getattr(torch, holding.dtype)
            parameters[name].copy_(box.view(dtype).view(holding.shape))
        receiver.applied(staged)

    An update may come in waves; each is staged, pinned and applied like that. From the first wave
    to the last, the instance serves no request.

    Attributes:
        memory: the arena, a `kvxfer.Memory`: on `gpu`, or in host memory and a writable buffer.
            Training ranks write it while an update is staged. From pin() to applied() it does not
            change: read it then.
        arena: the place of each parameter's box in `memory`. A box is contiguous, in the dtype and
            shape of its Holding. In waves, `arena` has only the parameters of the current wave.
        holdings: what this rank wants.
    """

    def __init__(
        self,
        engine: Engine,
        holdings: Holdings,
        *,
        instance_id: str,
        rank: int = 0,
        ranks: int = 1,
        commit: Callable[[Staged], Awaitable[float | None]] | None = None,
        decided: Callable[[str], Awaitable[End | None]] | None = None,
        version: int = 0,
        arena_bytes: int | None = None,
        gpu: int | None = None,
    ) -> None:
        """holdings: what this rank wants. ranks: those of the instance; rank 0 is its leader.

        commit: for the leader, if updates are committed by message and not by the inference
        engine's control path. Applies the update to the whole instance, and returns its pause in
        seconds, or None. If it raises, the instance leaves service. It runs on the event loop of
        `engine`, which it blocks until it awaits: copy in a thread (`asyncio.to_thread`).
        decided: for the leader, returns the recorded decision on an update. If none is recorded, it
        records an abort. None if the update is unknown there. Unless the decision is to commit, the
        other leaders are asked, too.
        version: the one that is served now. gpu: the GPU that has the arena; None for host memory.
        arena_bytes: the most bytes that are staged at once; this rank then takes updates in waves.
        Without it, it takes only whole updates.
        """
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"rank {rank} of {ranks}: ranks count from 0")
        if commit is not None and rank != 0:
            raise InvalidArgument(f"rank {rank} of {instance_id!r} has a commit; pass it to rank 0")
        self._engine = engine
        self.holdings = holdings
        self._commit = commit
        self._decided = decided
        self._me = (instance_id, rank, ranks)
        if arena_bytes is not None and arena_bytes < ALIGNMENT:
            raise InvalidArgument(f"arena_bytes is {arena_bytes}; use {ALIGNMENT} or more")
        self.arena: Arena = arena_of(holdings)
        self._arena_bytes = arena_bytes
        nbytes = self.arena.nbytes if arena_bytes is None else min(self.arena.nbytes, arena_bytes)
        self.memory: Memory = engine.alloc(nbytes, gpu)
        self._service = Service(version)
        self._links = Links(engine, self._message, self._lost)
        self._coordinator: Peer | None = None
        self._plan: Plan | None = None
        self._waves: list[Incoming] = []
        self._senders = Greeted()
        self._update: _Update | None = None
        self._receiving: asyncio.Task[None] | None = None
        """The task of the last update, even of one that was dropped: its writes may land until it
        ends."""
        self._outcomes = Outcomes()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Frees the arena. Drops an update that is not applied yet."""
        await self._links.close()
        await in_own_thread(self.memory.close)

    async def join(self, coordinator: str, timeout: float = JOIN_SECONDS) -> None:
        """Dials a coordinator, and again after each loss. Not needed if the coordinator dials this
        rank.

        Raises DeadlineExceeded, with the last error of connecting as its cause, and at once an
        error that another attempt would not change, such as AuthenticationFailed.
        """
        await self._links.join(coordinator, self._join, timeout)

    def dial(self, coordinator: str) -> None:
        """Dials a coordinator until this is closed, whatever fails; it need not run yet."""
        self._links.spawn(self._links.keep_connected(coordinator, self._join))

    @property
    def version(self) -> int:
        """The version that is served, or was before this rank went out of service. Any thread."""
        return self._service.version

    @property
    def digest(self) -> str | None:
        """The digest of what is served; None if no update has brought it. Any thread."""
        return self._service.digest

    @property
    def error(self) -> KvxferError | None:
        """The reason why the instance is out of service for good; None if it is not."""
        return self._service.error

    @property
    def partial(self) -> str | None:
        """The reason why it is out of service until its next whole update: it has only some waves
        of one. None otherwise."""
        return self._service.partial

    @property
    def idle(self) -> bool:
        """True if no update is arriving, staged or being applied."""
        return self._update is None

    # --- for the inference engine

    def pin(self, update_id: str) -> Staged:
        """Keeps the update from now on, whatever happens, until `applied()`, `broken()` or
        `unpin()`. Raises NotStaged if this rank has not staged the update: then no rank may apply
        it."""
        update = self._update
        if update is None or update.prepare.update_id != update_id or update.staged is None:
            what = "none" if update is None else f"{update.prepare.update_id} ({update.state})"
            raise NotStaged(
                f"{self._name} has not staged update {update_id}; it has {what}. Nothing of it is "
                "applied"
            )
        update.state = "pinned"
        return update.staged

    def unpin(self, update_id: str) -> None:
        """Drops an update that is not to be applied after all."""
        update = self._update
        if update is not None and update.prepare.update_id == update_id:
            self._drop(Said(WeightUpdateAborted.code, "it was given up before it was applied"))

    def applied(self, staged: Staged, pause_seconds: float | None = None) -> None:
        """Reports that this rank has applied the update, or the wave: it serves an update from its
        next step on."""
        plan_id = "" if self._update is None else self._update.prepare.plan_id
        self._service.applied(staged, plan_id)
        self._update = None
        self._outcomes.add(staged.update_id, "committed")
        self._links.send(self._coordinator, Applied(staged.update_id, pause_seconds))

    def broken(self, staged: Staged, error: BaseException) -> None:
        """Reports a failure to apply: the instance has to leave service. If a wave failed, the next
        update may bring the instance back."""
        self._service.failed(staged, error)
        self._update = None
        self._outcomes.add(staged.update_id, "committed")  # applied only after the decision
        self._links.send(self._coordinator, Applied(staged.update_id, failed=said(error)))

    # --- messages

    @property
    def _name(self) -> str:
        instance_id, rank, _ = self._me
        return rank_name(instance_id, rank)

    def _message(self, peer: Peer, message: Message) -> None:
        match message:
            case Invite():
                self._join(peer)
            case Hello():
                self._senders.add(message, peer)
            case Sent():
                self._sent(peer, message)
            case Ask():
                self._links.send(peer, Tell(message.update_id, self._told(message.update_id)))
            case Tell():
                self._outcomes.told(peer, message)
            case _ if peer is not self._coordinator:
                raise ProtocolError(f"{peer.name!r} is not the coordinator of {self._name}")
            case Plan():
                self._links.spawn(self._make_plan(peer, message))
            case Prepare():
                self._prepare(peer, message)
            case Abort():
                self._abort(message)
            case Commit():
                self._links.spawn(self._commit_told(message.update_id))
            case _:
                raise ProtocolError(f"{peer.name!r} sent {type(message).__name__} to a receiver")

    def _join(self, coordinator: Peer) -> None:
        instance_id, rank, ranks = self._me
        self._coordinator = coordinator
        self._links.send(
            coordinator,
            JoinInference(
                instance_id=instance_id,
                rank=rank,
                ranks=ranks,
                holdings=self.holdings,
                address=self._engine.address,
                by_message=self._commit is not None,
                serves=self.version,
                partial=self.partial is not None,
                arena_bytes=self._arena_bytes,
                version=VERSION,
            ),
        )

    async def _make_plan(self, coordinator: Peer, plan: Plan) -> None:
        try:
            waves = await asyncio.to_thread(incoming, plan)
        except Exception as error:
            self._links.send(coordinator, Planned(plan.plan_id, said(error)))
            return
        self._plan, self._waves = plan, waves
        self._links.send(coordinator, Planned(plan.plan_id))

    def _prepare(self, coordinator: Peer, prepare: Prepare) -> None:
        refusal = self._refusal(prepare)
        if refusal is not None:
            self._links.send(coordinator, Failed(prepare.update_id, refusal))
            return
        before = self._receiving
        self._drop(Said(WeightUpdateAborted.code, "another update began"))
        self._update = update = _Update(prepare)
        wave = self._waves[prepare.wave]
        self.arena = wave.arena
        update.receiving = Receiving(
            self._engine,
            self.memory.region,
            prepare,
            wave.expected,
            self._senders,
            self._links.send,
        )
        update.task = self._receiving = self._links.spawn(
            self._receive(coordinator, update, update.receiving, before)
        )

    def _refusal(self, prepare: Prepare) -> Said | None:
        update = self._update
        if self.error is not None:
            return Said(self.error.code, f"{self._name} is out of service: {self.error}")
        if update is not None and update.state == "pinned":
            return Said(
                WeightUpdateAborted.code,
                f"{self._name} is about to apply update {update.prepare.update_id}",
            )
        if self._plan is None or self._plan.plan_id != prepare.plan_id:
            return Said(ProtocolError.code, f"{self._name} has not made plan {prepare.plan_id}")
        if not self._service.begin(prepare):
            return Said(
                WeightUpdateAborted.code,
                f"{self._name} has not applied the wave before {prepare.update_id}",
            )
        if self._outcomes.of(prepare.update_id) is not None:
            return Said(
                WeightUpdateAborted.code,
                f"{self._name} has told others that it does not take update {prepare.update_id}",
            )
        return None

    async def _receive(
        self,
        coordinator: Peer,
        update: _Update,
        receiving: Receiving,
        before: asyncio.Task[None] | None,
    ) -> None:
        prepare = update.prepare
        try:
            if before is not None:
                await until_ended(before)
            digest = await receiving.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._update is update:
                self._update = None
            self._outcomes.add(prepare.update_id, "aborted")
            self._links.send(coordinator, Failed(prepare.update_id, said(error)))
            return
        update.state = "staged"
        update.staged = self._service.staged(prepare, digest)
        if not self._links.send(coordinator, Vote(prepare.update_id, update.staged.digest)):
            self._lost_after_staging(update)

    def _sent(self, peer: Peer, message: Sent) -> None:
        update = self._update
        if (
            update is not None
            and update.receiving is not None
            and update.prepare.update_id == message.update_id
        ):
            update.receiving.take(peer, message)

    def _abort(self, message: Abort) -> None:
        update = self._update
        if update is None or update.prepare.update_id != message.update_id:
            self._outcomes.add(message.update_id, "aborted")
        elif update.state != "pinned":
            self._drop(message.why)

    def _drop(self, why: Said) -> None:
        """Drops the update that is staged or arriving. Its writes may land until its task ends."""
        update, self._update = self._update, None
        if update is None:
            return
        self._outcomes.add(update.prepare.update_id, "aborted")
        if update.task is not None and not update.task.done():
            update.task.cancel()
        logger.info("%s drops update %s: %s", self._name, update.prepare.update_id, why.text)

    async def _commit_told(self, update_id: str) -> None:
        """Applies a committed update, at a leader that commits by message."""
        assert self._commit is not None  # noqa: S101 (JoinInference said so)
        coordinator = self._coordinator
        try:
            staged = self.pin(update_id)
        except NotStaged as error:
            self._links.send(coordinator, Applied(update_id, failed=said(error)))
            return
        try:
            pause = await self._commit(staged)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            logger.error("%s failed while it applied update %s", self._name, update_id)
            self.broken(staged, error)
            return
        self.applied(staged, pause)

    # --- the loss of the coordinator

    def _lost(self, peer: Peer, error: EngineError) -> None:
        self._senders.remove(peer)
        if peer is not self._coordinator:
            return
        self._coordinator = None
        update = self._update
        if update is None or update.state == "pinned":
            return
        if update.state == "receiving":
            self._drop(Said(error.code, f"the coordinator was lost: {error}"))
        else:
            self._lost_after_staging(update)

    def _lost_after_staging(self, update: _Update) -> None:
        """Handles a loss of the coordinator after staging. If the inference engine's control path
        commits, that decides, and the update stays staged."""
        if not update.prepare.last:
            # The waves that follow will not come. Those that this rank has applied stay applied.
            self._drop(Said(WeightUpdateAborted.code, "the coordinator was lost between waves"))
        elif self._commit is not None and (update.doubt is None or update.doubt.done()):
            update.doubt = self._links.spawn(self._in_doubt(update))

    async def _in_doubt(self, update: _Update) -> None:
        prepare = update.prepare
        others = [each for each in prepare.leaders if each != self._engine.address]
        end: End | None = None
        if self._decided is not None:
            end = await recorded(self._decided, prepare.update_id)
        if end != "committed":
            # The coordinator may have decided without the record, if that was not required.
            end = await resolve(self._links, self._outcomes, prepare.update_id, others)
        if self._update is not update or update.state == "pinned":
            return
        if end == "committed":
            await self._commit_told(prepare.update_id)
        else:
            self._drop(Said(WeightUpdateAborted.code, "its coordinator was lost before it decided"))

    def _told(self, update_id: str) -> Literal["committed", "aborted", "waiting", "doubt"]:
        """Returns the answer to another leader, which has lost the coordinator."""
        update = self._update
        if update is not None and update.prepare.update_id == update_id:
            if update.state == "pinned":
                # Ranks with a control path pin before the decision.
                return "waiting" if self._commit is None else "committed"
            if update.state == "staged":
                return "doubt" if self._coordinator is None else "waiting"
            # No update is committed without this rank's vote, so it may drop the update.
            self._drop(Said(WeightUpdateAborted.code, "another instance lost the coordinator"))
            if self._coordinator is not None:
                why = Said(WeightUpdateAborted.code, "an instance has lost the coordinator")
                self._links.send(self._coordinator, Failed(update_id, why))
            return "aborted"
        known = self._outcomes.of(update_id)
        if known is None:
            self._outcomes.add(update_id, "aborted")
        return known or "aborted"
