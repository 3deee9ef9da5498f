"""The link of a rank's membership to its mesh and exchange: feeds events to the membership, and
carries out its effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer.clock import Clock
from kvxfer.engine.callback import logger
from kvxfer.engine.native import translated
from kvxfer.engine.peer import Peer
from kvxfer.engine.synchronous import SynchronousEngine
from kvxfer.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvxferError,
    PeerLost,
    PeerTimeout,
    StepRefused,
)
from kvxfer.moe.hosts import hosts_of
from kvxfer.moe.membership import Membership, first_view
from kvxfer.moe.mesh import CONNECT_SECONDS, Mesh
from kvxfer.moe.messages import Farewell, Leaving, Message, Near
from kvxfer.moe.placement import Placement
from kvxfer.moe.shape import MoeShape
from kvxfer.moe.view_effects import Adopt, AskRank, Effect, Effects, End, Fence, Reply, Send
from kvxfer.moe.view_messages import Answer, Ask, Ended, Flush, Ready, Refusal, View

if TYPE_CHECKING:
    from kvxfer._native import MoeExchange

_TURN_SECONDS: Final = 0.5
_SHORT_SECONDS: Final = 0.05
"""Seconds between two checks for attempts that are due again."""
_JOIN_SECONDS: Final = 0.25
"""Seconds between two requests of a newcomer for the members, which may change."""
_REFUSAL_SECONDS: Final = 1.0
"""Seconds for others to learn why there is no group."""


class Run(NamedTuple):
    """The steps from `first_step` on that are run in one view."""

    first_step: int
    members: tuple[int, ...]
    table: npt.NDArray[np.int64]


class Agreement:
    """The agreement of one rank with the others. `steps` are those that it has begun and not ended.
    loss_seconds: the time in which members notice that a rank is frozen."""

    def __init__(
        self,
        engine: SynchronousEngine,
        exchange: MoeExchange,
        shape: MoeShape,
        placement: Placement,
        rank: int,
        min_ranks: int,
        loss_seconds: float,
        clock: Clock,
    ) -> None:
        self.steps: set[int] = set()
        self._refusals: dict[int, Refusal] = {}
        """The refusals of steps that are not run: later steps, and those begun here."""
        self._runs: list[Run] = []
        self._engine, self._exchange, self._clock = engine, exchange, clock
        self._placement, self._rank, self._min_ranks = placement, rank, min_ranks
        self._ranks, self._loss_seconds = len(placement.ranks), loss_seconds
        self._mesh = Mesh(engine, exchange, shape, placement, rank, self, clock)
        self._membership: Membership | None = None  # set once the group has formed
        self._early: list[tuple[int, Message]] = []
        self._failure: Exception | None = None
        self._refusing: set[int] = set()
        self._wanted: frozenset[int] = frozenset()
        self._taken_since: float | None = None
        """The time since which answering members are connected to another process of this rank."""
        self._asks: list[tuple[float, AskRank]] = []
        self._we_leave = False
        self._leaving: dict[int, int] = {}  # ranks, and how many steps they have run
        self._let_go: set[int] = set()
        self._lets_us_go: set[int] = set()
        self._near: dict[int, frozenset[int]] = {}
        """The ranks near each rank, as it has reported them, and itself."""

    @property
    def view(self) -> View:
        """The last view that this rank has adopted."""
        if self._membership is None or self._membership.view is None:
            raise PeerLost("the group has not formed")
        return self._membership.view

    def run(self, step: int) -> Run:
        """Returns the run of a step that is under way; not always that of the last view."""
        for run in reversed(self._runs):
            if run.first_step <= step:
                return run
        raise InvalidArgument(f"step {step} was never begun")

    # --- set-up

    def form(self, addresses: Sequence[str], deadline: float) -> None:
        """Connects to all ranks, and adopts the first view. Raises the refusal of another rank,
        PeerLost, or DeadlineExceeded."""
        others = frozenset(range(self._ranks)) - {self._rank}
        try:
            self._mesh.dial({rank: addresses[rank] for rank in others if rank < self._rank})
            while self._failure is None and not self._mesh.set_up_with >= others:
                if not self._pass(deadline):
                    raise DeadlineExceeded(
                        f"rank {self._rank}: no group of {self._ranks} ranks has formed: "
                        f"{self._mesh.missing(others)}"
                    )
            self._raise()
        except KvxferError as error:
            self._refuse(error, others)
            raise
        self._mesh.addresses |= dict(enumerate(addresses))
        view = first_view(self._ranks)
        self._membership = Membership(self._rank, self._ranks, view, min_ranks=self._min_ranks)
        self._do((Adopt(view),))
        early, self._early = self._early, []
        for rank, message in early:
            self.heard(rank, message)

    def _refuse(self, error: KvxferError, others: frozenset[int]) -> None:
        """Tells all ranks, and waits, a second at most, until they refuse too or are lost."""
        self._refusing = set(others)
        self._mesh.refuse(error)
        deadline = self._clock.monotonic() + _REFUSAL_SECONDS
        while self._refusing and self._pass(deadline):
            pass

    def join(self, address: str, deadline: float) -> None:
        """Joins as a newcomer, in the place of a rank that is no member. Raises as form() does."""
        self._membership = Membership(self._rank, self._ranks, None, min_ranks=self._min_ranks)
        met: list[Peer | Exception] = []
        self._engine.connect(address, CONNECT_SECONDS, met.append)
        asked = -_JOIN_SECONDS
        while self._membership.view is None:
            if met and (now := self._clock.monotonic()) >= asked + _JOIN_SECONDS:
                if isinstance(met[0], Exception):
                    raise met[0]
                asked = now
                self._mesh.ask_members(met[0])
            if not self._pass(deadline, _SHORT_SECONDS):
                raise DeadlineExceeded(
                    f"rank {self._rank} was not let in by {address}: "
                    + (self._mesh.missing(self._wanted) or "it calls no step")
                )
            self._raise()

    def members_known(self, addresses: dict[int, str], *, taken: bool) -> None:
        """Takes the members that a newcomer has to be set up with; none until they have agreed that
        the rank whose place it takes is lost. taken: the member that answers has not lost it."""
        if self._membership is None or self._membership.view is not None:
            return
        now = self._clock.monotonic()
        self._taken_since = (self._taken_since or now) if taken else None
        if self._taken_since is not None and now - self._taken_since > self._loss_seconds:
            self._failure = InvalidArgument(
                f"rank {self._rank} is not let in: its place is taken, by a process that is alive; "
                "join as a rank that was lost, or end that process first"
            )
        self._wanted = frozenset(addresses)
        self._mesh.dial(addresses)
        self._announce()

    def _announce(self) -> None:
        """Announces this newcomer, if it is set up with all members that it knows."""
        complete = self._wanted and self._mesh.set_up_with >= self._wanted
        if self._membership is not None and complete:
            self._do(self._membership.announce())

    # --- between and within steps

    def boundary(self, deadline: float) -> None:
        """Agrees on the next view, if there is a reason, before a step begins."""
        with translated():
            quiet = self._exchange.quiet()
        if quiet and self._member.calm and not self._leaving:
            return
        self.take()
        self._settle(self._member.boundary, deadline)

    def refuse(self, why: InvalidArgument, deadline: float) -> None:
        """Refuses the next step, which this rank cannot begin: agrees with all members that no rank
        runs it, and skips it."""
        step = self._exchange.next_step
        if step not in self._refusals:
            self._do(self._member.refuse(step, str(why)))
            self._settle(self._member.waiting, deadline)
        if self._refusals.pop(step, None) is not None:
            self._exchange.skip_step()

    def refusal(self, step: int) -> StepRefused:
        """Returns why a step is not run, and ends the step."""
        refusal = self._refusals.pop(step)
        self.step_ended(step)
        return StepRefused(f"rank {refusal.rank} refused step {step}: {refusal.why}")

    def settle(self, deadline: float) -> None:
        """Agrees on the next view, if another rank wants one, before a dispatch completes."""
        self._settle(self._member.waiting, deadline)

    def doubt(self, deadline: float) -> bool:
        """Agrees on the next view if half of the members or more are lost, as this rank itself may
        be the lost one. Returns whether it did; the caller then has to wait again."""
        lost = self._exchange.lost()
        if not lost or 2 * len(lost) < len(self.view.members):
            return False
        self.boundary(deadline)
        return True

    def attend(self) -> None:
        """Takes events while the rank waits in a step, and reacts."""
        self.take()
        self._do(self._member.waiting(self._exchange.next_step))
        self._raise()

    def _settle(self, meet: Callable[[int], Effects], deadline: float) -> None:
        member = self._member
        while True:
            self._do(meet(self._exchange.next_step))
            self._raise()
            if not member.blocked:
                return
            if not self._pass(deadline):
                rest = sorted({*self.view.members} - member.lost - {self._rank})
                lost = f"; lost are ranks {sorted(member.lost)}" if member.lost else ""
                raise DeadlineExceeded(
                    f"rank {self._rank}: ranks {rest} do not agree on the next view: they are "
                    f"alive, but call no step{lost}"
                )

    def take(self) -> None:
        """Feeds all events to the membership. Raises the error that ends this rank."""
        self._engine.take()
        self._losses()
        self._bid()
        self._raise()

    def _pass(self, deadline: float, most: float = _TURN_SECONDS) -> bool:
        """Waits for events, and feeds them to the membership. Returns False at the deadline."""
        now = self._clock.monotonic()
        due = [ask for at, ask in self._asks if at <= now]
        self._asks = [(at, ask) for at, ask in self._asks if at > now]
        for ask in due:
            self._mesh.ask(ask.rank, ask.ask)
        if self._asks or self._mesh.redials:
            most = min(most, _SHORT_SECONDS)
        self._engine.wait(max(0.0, min(most, deadline - now)))
        self._mesh.redial()
        self._losses()
        self._bid()
        return now < deadline

    def _losses(self) -> None:
        """Feeds the losses of the exchange, whether or not a connection has ended."""
        if self._membership is None or self._membership.view is None:
            return
        for rank in self._exchange.lost():
            if rank not in self._membership.lost:
                code, why = self._exchange.why_lost(rank)
                self._mesh.fence(rank)
                self._lose(rank, why, silent=code == PeerTimeout.code)

    def _lose(self, rank: int, why: object, *, silent: bool) -> None:
        assert self._membership is not None  # noqa: S101
        view, known = self._membership.view, self._membership.lost | self._leaving.keys()
        if not self._we_leave and view is not None and rank in {*view.members} - known:
            logger.warning("rank %d has lost rank %d: %s", self._rank, rank, why)
        self._do(self._membership.lose(rank, silent=silent))

    @property
    def _member(self) -> Membership:
        self._raise()
        assert self._membership is not None  # noqa: S101
        return self._membership

    def _raise(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _do(self, effects: Effects) -> None:
        try:
            for effect in effects:
                self._do_one(effect)
        except Exception as error:
            self._failure = error  # kept, as the engine only logs what a handler raises
            raise

    def _do_one(self, effect: Effect) -> None:
        match effect:
            case Send(rank, message):
                self._mesh.send(rank, message)
            case Fence(rank):
                self._mesh.fence(rank)
            case AskRank():
                pause = _SHORT_SECONDS if effect.pause else 0.0
                self._asks.append((self._clock.monotonic() + pause, effect))
            case Reply(rank, answer):
                self._mesh.reply(rank, answer)
            case Adopt(view):
                self._adopt(view)
            case End(error):
                logger.warning("rank %d: %s", self._rank, error)
                self._failure = error

    def _adopt(self, view: View) -> None:
        alive = [rank in view.members for rank in range(self._ranks)]
        table = self._placement.table(alive, self._rank, self._mesh.near)
        near = Near(frozenset(self._mesh.near & {*view.members}))
        self._near[self._rank] = near.ranks | {self._rank}
        self._leave_out(view)
        # Before steps are posted again: a newcomer may be on another host than its predecessor.
        self._hosts_known()
        with translated():
            self._exchange.set_view(view.number, alive, table, view.first_step)
        earlier = [run for run in self._runs if self.steps and run.first_step < view.first_step]
        self._runs = [*earlier, Run(view.first_step, view.members, table)]
        self._mesh.admit(frozenset(view.members))
        for rank in {*view.members} - {self._rank}:
            self._mesh.send(rank, near)
        logger.info(
            "rank %d: view %d of ranks %s from step %d on",
            *(self._rank, view.number, list(view.members), view.first_step),
        )

    def _leave_out(self, view: View) -> None:
        """Leaves out refused steps, before others are posted again. Ignores those that ended."""
        for refusal in view.refused:
            step = refusal.step
            heard = step in self._refusals
            if heard or not (step in self.steps or step >= self._exchange.next_step):
                continue
            self._refusals[step] = refusal
            logger.warning(
                "rank %d: no rank runs step %d: rank %d refused it: %s",
                *(self._rank, step, refusal.rank, refusal.why),
            )
            with translated():
                self._exchange.leave_out(step)

    def _hosts_known(self) -> None:
        with translated():
            self._exchange.set_hosts(hosts_of(self._ranks, self._near))

    # --- the end

    def take_leave(self, deadline: float) -> None:
        """Waits until the other members have ended all steps that this rank has ended, or leave, or
        are lost."""
        self._we_leave = True
        if self._failure is not None or self._membership is None or self._membership.view is None:
            return
        for rank in self._stay():
            self._mesh.send(rank, Leaving(self._exchange.next_step))
        while self._stay() and self._failure is None and self._pass(deadline):
            pass

    def _stay(self) -> set[int]:
        """Returns the ranks that may still need what this one has sent."""
        others = {*self.view.members} - {self._rank} - self._member.lost
        return others - self._lets_us_go - self._leaving.keys()

    def _bid(self) -> None:
        """Releases departing ranks, once no step here needs their data."""
        for rank, steps in self._leaving.items():
            needed = self._exchange.next_step < steps or any(step < steps for step in self.steps)
            if rank not in self._let_go and not needed:
                self._let_go.add(rank)
                self._mesh.send(rank, Farewell())

    def step_ended(self, step: int) -> None:
        self.steps.discard(step)
        if self._leaving:
            self._bid()

    def close(self) -> None:
        self._we_leave = True
        self._mesh.close()

    # --- MeshHandler

    def set_up(self, rank: int) -> None:
        if self._membership is None:
            return
        if self._membership.view is None or rank not in self._membership.view.members:
            self._do(self._membership.newcomer(rank))
            self._announce()

    def heard(self, rank: int, message: Message) -> None:
        if self._membership is None:
            self._early.append((rank, message))
            return
        match message:
            case Leaving(steps):
                self._leaving[rank] = steps
            case Farewell():
                self._lets_us_go.add(rank)
            case Near(ranks):
                self._near[rank] = ranks | {rank}
                self._hosts_known()
            case Flush() | View() | Ended() | Ready():
                self._do(self._membership.received(rank, message))

    def asked(self, ask: Ask) -> None:
        if self._membership is not None:
            self._do(self._membership.asked(ask))

    def answered(self, rank: int, ask: Ask, answer: Answer | None) -> None:
        if self._membership is not None:
            self._do(self._membership.answered(rank, ask, answer))

    def lost(self, rank: int, error: Exception) -> None:
        self._refusing.discard(rank)
        self._near.pop(rank, None)
        if self._membership is not None:
            self._lose(rank, error, silent=isinstance(error, PeerTimeout))
        elif self._failure is None:
            self._failure = PeerLost(
                f"rank {self._rank}: rank {rank} was lost while the group formed: {error}"
            )
        self._leaving.pop(rank, None)
        self._let_go.discard(rank)
        self._lets_us_go.discard(rank)

    def refused(self, rank: int | None, error: Exception) -> None:
        if rank is not None:
            self._refusing.discard(rank)
        if self._membership is None or self._membership.view is None:
            self._failure = self._failure or error
        else:
            logger.warning("rank %d: a rank does not join: %s", self._rank, error)
