"""The agreement on which ranks are alive, and since which step: equal at all of them.

A pure state machine: events go in, effects come out, to be carried out in their order. It has no
clock and no I/O, so verify/simulation/moe runs it on virtual time.

The model is virtual synchrony (K. Birman, T. Joseph, "Exploiting virtual synchrony in distributed
systems", SOSP 1987): a group goes through a sequence of views, and all members that go from one
view to the next have completed the same steps in the first. Three things differ. A rank may
complete a step without the contribution of a rank that it lost, and others with it: masks are each
rank's own, and are not agreed on. Members are flushed where they wait, so that steps under way are
run again in the next view rather than delivered before it. And a view need not have a majority,
because most of a group may really be dead; instead, lost ranks are asked.

*Flush.* At its boundary a rank that has lost a member begins a change of the view with FLUSH. A
rank that is at its boundary, or waits in a step, answers with its own. From its FLUSH until it
adopts a view, a rank begins no step and completes no dispatch. Its FLUSH has the first step that it
has not dispatched, and the members that it has lost so far.

*Decision.* The leader is the lowest member that is not lost. When all members that are not lost
have sent a FLUSH with the same lost members as its own, it decides on the next view: these members,
newcomers, and the first step, which is the lowest of theirs. A rank whose FLUSH was counted has
completed no dispatch of that step or of later ones: it waited for the rank that has not dispatched
the step, which it has not lost. So these steps are run in the new view. Earlier steps are run in
the old one: every member has dispatched them.

*One view after another.* A rank takes nothing from a rank that it has lost, and a lost rank stays
lost. A decision needs the FLUSH of each member that is not lost, with the lost members of the
deciding rank. So all that took part refuse views decided by the lost ones, and none of them decides
otherwise. If the leader is lost after its decision, ranks that have the view answer a FLUSH of the
old one with it; while one of them is connected to the rest, the rest lacks its FLUSH and cannot
decide. Views of ranks that have lost each other have different numbers: a number includes the
deciding rank.

*Accusations.* A loss shows as silence, or as the end of the connection, which a rank also sees if
it was itself taken for dead. Hearsay alone makes no member lost: the others see a death themselves.
If two members accuse each other and neither is lost here, one of them is taken for lost, the same
one everywhere: the one that only saw its connection end, or else the higher. So a false suspicion
costs one rank, not two.

*Asking.* Before it decides, a leader asks lost ranks whether they are alive: with half of the
members or fewer, every rank that does not survive; with more, those that were not silent, which may
have continued while this side was frozen. A rank that has a later view excludes the asker.
Otherwise the larger side continues, or at equal size the one with the lowest rank: the asked rank
gives way, or the asker waits for the other side. A rank whose engine does not answer is dead or
frozen; when it wakes up, it finds itself alone, asks, and learns the outcome. If a network is cut
in two for good, both sides continue, except those of fewer than `min_ranks`.

*Refusals.* A rank that cannot begin a step begins a change of the view instead; its FLUSH says why.
The next view lists the step, and all members leave it out. No member has completed its dispatch, as
the view's first step is not a later one. The view also lists earlier refusals of steps that some
member, or a newcomer, has not reached. If the refusing rank is lost before the decision, the step
is run without it.

*Newcomers.* A process takes the place of a rank that is not a member. It is set up with all members
and says so (READY); the leader begins a change, and admits it if every survivor is set up with it.
It begins with the view's first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from kvxfer.errors import InvalidArgument, MoeGroupLost, RankExcluded
from kvxfer.moe.accusations import loser
from kvxfer.moe.view_effects import Adopt, AskRank, Effect, Effects, End, Fence, Reply, Send
from kvxfer.moe.view_messages import (
    MOST_REFUSALS,
    MOST_WHY,
    Answer,
    Ask,
    Ended,
    Excluded,
    Flush,
    Message,
    Ready,
    Refusal,
    View,
    Wait,
    Yield,
)

_Loss: TypeAlias = Literal["silent", "closed", "judged"]


def first_view(ranks: int) -> View:
    """Returns the first view of a group."""
    return View(number=0, previous=0, members=tuple(range(ranks)), newcomers=(), first_step=0)


class Membership:
    """The membership of one rank. `view`: the first one; None for a newcomer, which waits to be
    admitted.

    min_ranks: a group of fewer ends with MoeGroupLost.
    """

    def __init__(self, rank: int, ranks: int, view: View | None, *, min_ranks: int = 1) -> None:
        self.rank, self.ranks, self.min_ranks = rank, ranks, min_ranks
        self.ended: RankExcluded | MoeGroupLost | None = None
        self.blocked = False
        """Whether it awaits a view after its FLUSH: no step begins, no dispatch completes."""
        self._step = 0
        """The next step, while blocked."""
        self._admitted = view is not None
        self._view = view or View(number=0, previous=0, members=(), newcomers=(), first_step=0)
        self._lost: dict[int, _Loss] = {}
        """The lost members, and how each was lost; "judged" is by an accusation of another one."""
        self._flushes: dict[int, Flush] = {}
        """The last FLUSH of each rank, of this view or a later one."""
        self._told: Flush | None = None
        self._refuses = ""
        """The reason why it cannot begin the next step; empty if it can."""
        self._ready: set[int] = set()
        """Ranks that are not members, and are set up with this one."""
        self._announced: dict[int, frozenset[int]] = {}
        """Newcomers, and the ranks that each is set up with."""
        self._tried: set[int] = set()
        """Newcomers for which a change was begun."""
        self._asking: Ask | None = None
        self._unanswered: set[int] = set()

    @property
    def view(self) -> View | None:
        """The current view; None for a newcomer that is not admitted yet."""
        return self._view if self._admitted else None

    @property
    def lost(self) -> frozenset[int]:
        """The members that are lost here."""
        return frozenset(self._lost)

    @property
    def calm(self) -> bool:
        """True for a member that has nothing to agree on with others."""
        return not (self._lost or self._flushes or self._announced or self._idle())

    # --- events

    def boundary(self, step: int) -> Effects:
        """Handles a rank that is about to dispatch `step`; all earlier events have been fed in."""
        if not (self._lost or self._flushes or self._announced) or self._idle():
            return ()
        if not (self._lost or self._called() or self._next_newcomers()):
            return ()
        return self._flush(step)

    def waiting(self, next_step: int) -> Effects:
        """Handles a rank that waits in a step, and has dispatched all before `next_step`. All
        earlier events have been fed in."""
        if not (self._lost or self._flushes) or self._idle():
            return ()
        if not (self._called() or self._alone_knows_the_view()):
            return ()
        return self._flush(next_step)

    def refuse(self, step: int, why: str) -> Effects:
        """Refuses `step`, at a boundary with nothing to agree on: in the next view, no rank runs
        it. Does nothing if some rank has too many refused steps before it."""
        if self._idle() or len(self._view.refused) >= MOST_REFUSALS:
            return ()
        self._refuses = why[:MOST_WHY]
        return self._flush(step)

    def lose(self, rank: int, *, silent: bool) -> Effects:
        """Handles the loss of the connection to a rank. `silent`: because the rank fell silent."""
        self._ready.discard(rank)
        self._announced.pop(rank, None)
        self._tried.discard(rank)
        self._flushes.pop(rank, None)
        if rank not in self._view.members or rank in self._lost:
            return ()
        self._lost[rank] = "silent" if silent else "closed"
        return self._advance()

    def newcomer(self, rank: int) -> Effects:
        """Handles the set-up with a rank that is not a member; at a newcomer, with any rank."""
        if rank in self._view.members:
            raise InvalidArgument(f"rank {rank} is a member of view {self._view.number}")
        self._ready.add(rank)
        return self._advance()

    def announce(self) -> Effects:
        """Announces a newcomer that is set up with all members that it knows."""
        ready = Ready(_ordered(self._ready))
        return tuple(Send(rank, ready) for rank in ready.welcomed)

    def received(self, rank: int, message: Message) -> Effects:
        """Handles a message of a rank over the connection of its pair."""
        if self.ended is not None or rank in self._lost:
            return ()
        match message:
            case Ready():
                return self._received_ready(rank, message)
            case Flush():
                return self._received_flush(rank, message)
            case View():
                return self._received_view(rank, message)
            case Ended():
                lost = message.code == MoeGroupLost.code
                return self._end(
                    self._group_lost() if lost else self._excluded(f"rank {rank} says so")
                )

    def answered(self, rank: int, ask: Ask, answer: Answer | None) -> Effects:
        """Handles the answer of a rank; None if its engine does not answer, or is lost first."""
        if self.ended is not None or ask != self._asking or rank not in self._unanswered:
            return ()
        if isinstance(answer, Wait):
            return (AskRank(rank, ask, pause=True),)
        if isinstance(answer, Excluded):
            return self._end(self._excluded(f"rank {rank} says so"), tell=ask.survivors)
        self._unanswered.discard(rank)
        return self._advance()

    def asked(self, ask: Ask) -> Effects:
        """Handles the question of a rank that has lost this one."""
        view = self._view
        if self.ended is not None or not self._admitted:
            return (Reply(ask.rank, Yield(view.number)),)
        member = ask.rank in view.members
        known = member and ask.view in (view.number, view.previous)
        if self._round(view.number) >= self._round(ask.view) and not known:
            return (Reply(ask.rank, Excluded(view.number)),)
        own = {self.rank} | set(view.members) - self.lost - set(ask.survivors)
        if _strength(own) > _strength(ask.survivors):
            # Two halves that have both continued stay apart: this one never decides on the asker.
            return (Reply(ask.rank, Wait(view.number) if member else Excluded(view.number)),)
        ended = self._end(self._excluded(f"rank {ask.rank} goes on with {[*ask.survivors]}"))
        return (Reply(ask.rank, Yield(view.number)), *ended)

    # --- messages

    def _received_ready(self, rank: int, ready: Ready) -> Effects:
        if rank in self._ready:
            self._announced[rank] = frozenset(ready.welcomed)
            self._tried.discard(rank)
        return ()

    def _received_flush(self, rank: int, flush: Flush) -> Effects:
        view = self._view
        if not self._admitted or self._round(flush.view) > self._round(view.number):
            self._flushes[rank] = flush
            return ()
        if flush.view == view.number and rank in view.members:
            self._flushes[rank] = flush
            return self._advance()
        if flush.view == view.previous and rank in view.members:
            # The rank gets the view from its decider, unless it has lost that.
            return (Send(rank, view),) if self._decider(view) in flush.lost else ()
        if self._round(flush.view) == self._round(view.number) or rank not in view.members:
            return (Send(rank, Ended(view.number, RankExcluded.code)),)
        return ()  # sent before it adopted this view's predecessor

    def _received_view(self, rank: int, view: View) -> Effects:
        if not self._admitted:
            return self._adopt(view) if self.rank in view.newcomers else ()
        if view.number == self._view.number:
            return ()
        if rank not in self._view.members:  # two halves of a group have admitted this newcomer
            self._ready.discard(rank)
            return (Fence(rank),)
        if self._round(view.number) < self._round(self._view.number):
            return ()
        if view.previous == self._view.number and self.blocked:
            if self.rank in view.members:
                return self._adopt(view)
            return self._end(self._excluded(f"view {view.number} is {[*view.members]}"))
        # The others have not adopted the view that has admitted this rank.
        return self._end(self._excluded(f"view {view.number} follows {view.previous}"))

    # --- a change of the view

    def _idle(self) -> bool:
        return not self._admitted or self.blocked or self.ended is not None

    def _called(self) -> bool:
        """Returns whether another member has begun a change."""
        number = self._view.number
        return any(flush.view == number for flush in self._flushes.values())

    def _alone_knows_the_view(self) -> bool:
        """Returns whether this newcomer may alone have the view; it then has to begin the next."""
        return self.rank in self._view.newcomers and self._decider(self._view) in self._lost

    def _next_newcomers(self) -> set[int]:
        """Returns the newcomers for whom this rank, as the leader, has to begin a change."""
        survivors = self._survivors()
        if self.rank != min(survivors):
            return set()
        return {
            rank
            for rank, welcomed in self._announced.items()
            if welcomed >= survivors and rank not in self._tried
        }

    def _flush(self, step: int) -> Effects:
        self.blocked, self._step = True, step
        self._tried |= self._announced.keys()
        return self._advance()

    def _advance(self) -> Effects:
        """Continues a change of the view, as far as this rank can."""
        if not self.blocked or self.ended is not None:
            return ()
        effects: list[Effect] = [*self._conclude()]
        if self.ended is None:
            effects += self._tell()
            effects += self._decide()
        return tuple(effects)

    def _conclude(self) -> Iterable[Effect]:
        """Takes one of each two members that accuse each other for lost."""
        while (rank := loser(self.rank, told := self._current_flushes())) is not None:
            if rank == self.rank:
                yield from self._end(self._excluded("a member has lost it"))
                return
            self._lost[rank] = "closed" if self.rank in told[rank].lost else "judged"
            yield Fence(rank)

    def _current_flushes(self) -> dict[int, Flush]:
        return {
            rank: flush
            for rank, flush in self._flushes.items()
            if flush.view == self._view.number and rank not in self._lost
        }

    def _tell(self) -> Iterable[Effect]:
        flush = Flush(
            view=self._view.number,
            next_step=self._step,
            lost=_ordered(self._lost),
            closed=_ordered(rank for rank, how in self._lost.items() if how == "closed"),
            ready=_ordered(self._ready),
            judged=_ordered(rank for rank, how in self._lost.items() if how == "judged"),
            refuses=self._refuses,
        )
        if flush == self._told:
            return
        self._told = flush
        for rank in sorted(self._survivors() - {self.rank}):
            yield Send(rank, flush)

    def _decide(self) -> Effects:
        """Asks lost ranks, or decides, at the leader, once all survivors report the same."""
        survivors = self._survivors()
        told = self._current_flushes()
        if self.rank != min(survivors) or not self._all_say_the_same(survivors, told):
            return ()
        ask = Ask(self.rank, self._view.number, _ordered(survivors))
        if ask != self._asking:
            self._asking = ask
            self._unanswered = self._doubtful(survivors, told.values())
            return tuple(AskRank(rank, ask) for rank in sorted(self._unanswered)) or self._decide()
        if self._unanswered:
            return ()
        admitted = self._admissible(survivors, told.values())
        if len(survivors) + len(admitted) < self.min_ranks:
            return self._end(self._group_lost(), tell=survivors)
        first_step = self._first_step(told.values())
        view = View(
            number=self._next_number(),
            previous=self._view.number,
            members=_ordered(survivors | admitted),
            newcomers=_ordered(admitted),
            first_step=first_step,
            refused=self._left_out(first_step, told),
        )
        others = [rank for rank in view.members if rank != self.rank]
        return (*(Send(rank, view) for rank in others), *self._adopt(view))

    def _all_say_the_same(self, survivors: set[int], told: Mapping[int, Flush]) -> bool:
        return told.keys() == survivors - {self.rank} and all(
            set(flush.lost) == self.lost for flush in told.values()
        )

    def _next_number(self) -> int:
        return (self._round(self._view.number) + 1) * self.ranks + self.rank

    def _first_step(self, told: Iterable[Flush]) -> int:
        return min([self._step, *(flush.next_step for flush in told)])

    def _left_out(self, first_step: int, told: Mapping[int, Flush]) -> tuple[Refusal, ...]:
        """Returns a refusal for each step that is not run in the next view: that of the current
        view, or else that of the lowest rank."""
        refused = {each.step: each for each in self._view.refused if each.step >= first_step}
        said = {rank: (flush.next_step, flush.refuses) for rank, flush in told.items()}
        said[self.rank] = (self._step, self._refuses)
        for rank, (step, why) in sorted(said.items()):
            if why:
                refused.setdefault(step, Refusal(step, rank, why))
        return tuple(refused[step] for step in sorted(refused))

    def _doubtful(self, survivors: set[int], told: Iterable[Flush]) -> set[int]:
        """Returns the ranks that the leader has to ask before it decides."""
        if 2 * len(survivors) <= len(self._view.members):
            return set(range(self.ranks)) - survivors - self._ready
        lost = {rank for rank, how in self._lost.items() if how != "silent"}
        return lost.union(*({*flush.closed, *flush.judged} for flush in told))

    def _admissible(self, survivors: set[int], told: Iterable[Flush]) -> set[int]:
        """Returns the newcomers of the next view: each two are set up with each other."""
        listed = self._ready.intersection(*(flush.ready for flush in told))
        admitted: set[int] = set()
        for rank in sorted(listed & self._announced.keys()):
            mutual = all(rank in self._announced[other] for other in admitted)
            if mutual and self._announced[rank] >= survivors | admitted:
                admitted.add(rank)
        return admitted

    def _adopt(self, view: View) -> Effects:
        effects: list[Effect] = []
        gone = set(self._view.members) - set(view.members) - self.lost
        effects += [Fence(rank) for rank in sorted(gone)]
        met = set(view.newcomers if self._admitted else view.members)
        self._view, self._admitted, self.blocked = view, True, False
        self._told = self._asking = None
        self._refuses = ""
        members = set(view.members)
        self._lost = {rank: how for rank, how in self._lost.items() if rank in members}
        for rank in sorted(met - self._ready - {self.rank}):  # lost since its set-up
            self._lost[rank] = "closed"
            effects.append(Fence(rank))
        self._ready -= members
        self._tried -= members
        self._announced = {r: with_ for r, with_ in self._announced.items() if r not in members}
        effects.append(Adopt(view))
        if self._decider(view) != self.rank:  # the decider may be lost before
            others = (rank for rank in view.newcomers if rank != self.rank)
            effects += [Send(rank, view) for rank in others if rank not in self._lost]
        held, self._flushes = self._flushes, {}
        for rank, flush in held.items():
            if rank not in self._lost:
                effects += self._received_flush(rank, flush)
        return tuple(effects)

    def _end(
        self, error: RankExcluded | MoeGroupLost, *, tell: Iterable[int] = ()
    ) -> tuple[Effect, ...]:
        self.ended = error
        told = Ended(self._view.number, error.code)
        return (*(Send(rank, told) for rank in tell if rank != self.rank), End(error))

    def _excluded(self, why: str) -> RankExcluded:
        return RankExcluded(
            f"the group goes on without rank {self.rank}: {why}; join it again as a newcomer"
        )

    def _group_lost(self) -> MoeGroupLost:
        return MoeGroupLost(
            f"ranks {sorted(self._survivors())} are fewer than min_ranks ({self.min_ranks})"
        )

    def _survivors(self) -> set[int]:
        return set(self._view.members) - self.lost

    def _round(self, number: int) -> int:
        return number // self.ranks

    def _decider(self, view: View) -> int:
        return view.number % self.ranks


def _ordered(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _strength(side: Iterable[int]) -> tuple[int, int]:
    """Returns the strength of a side; of two sides, the stronger continues."""
    ranks = set(side)
    return (len(ranks), -min(ranks))
