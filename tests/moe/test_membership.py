"""The state machine of views, in small groups whose messages arrive when a test delivers them."""

from __future__ import annotations

import pytest

from kvxfer.errors import InvalidArgument, MoeGroupLost, RankExcluded
from kvxfer.moe.membership import Membership, first_view
from kvxfer.moe.view_effects import Adopt, AskRank, Effect, End, Fence, Reply, Send
from kvxfer.moe.view_messages import (
    MOST_REFUSALS,
    MOST_WHY,
    Ask,
    Ended,
    Excluded,
    Flush,
    Refusal,
    View,
    Wait,
    Yield,
)


class Group:
    """Ranks, and their messages, which are in flight until deliver()."""

    def __init__(self, ranks: int, *, min_ranks: int = 1) -> None:
        self.ranks = {
            rank: Membership(rank, ranks, first_view(ranks), min_ranks=min_ranks)
            for rank in range(ranks)
        }
        self.count = ranks
        self.sent: list[tuple[int, Send]] = []
        self.adopted: dict[int, list[View]] = {rank: [] for rank in self.ranks}
        self.fenced: list[tuple[int, int]] = []
        self.asks: list[tuple[int, AskRank]] = []
        self.dead: set[int] = set()

    def do(self, rank: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.sent.append((rank, effect))
                case Fence():
                    self.fenced.append((rank, effect.rank))
                case AskRank():
                    self.asks.append((rank, effect))
                case Adopt():
                    self.adopted[rank].append(effect.view)
                case End() | Reply():
                    pass

    def kill(self, *ranks: int) -> None:
        """Ends the ranks' connections at every other rank."""
        self.dead |= {*ranks}
        for rank in self.alive():
            for dead in ranks:
                self.do(rank, self.ranks[rank].lose(dead, silent=False))

    def alive(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.dead]

    def refuse(self, rank: int, step: int, why: str = "why") -> None:
        self.do(rank, self.ranks[rank].refuse(step, why))

    def boundary(self, rank: int, step: int) -> None:
        self.do(rank, self.ranks[rank].boundary(step))

    def waiting(self, rank: int, next_step: int) -> None:
        self.do(rank, self.ranks[rank].waiting(next_step))

    def deliver(self, *, only_to: int | None = None) -> None:
        """Delivers what is in flight, and the messages that follow; ranks that are asked do not
        answer."""
        while ready := [each for each in self.sent if only_to in (None, each[1].rank)]:
            sender, send = ready[0]
            self.sent.remove(ready[0])
            if send.rank not in self.dead and sender not in self.dead:
                self.do(send.rank, self.ranks[send.rank].received(sender, send.message))

    def unanswered(self) -> None:
        asks, self.asks = self.asks, []
        for rank, ask in asks:
            self.do(rank, self.ranks[rank].answered(ask.rank, ask.ask, None))

    def view(self, rank: int) -> View:
        view = self.ranks[rank].view
        assert view is not None
        return view


def _change(group: Group, steps: dict[int, int]) -> None:
    """Brings all ranks to their boundaries before these steps, and makes them agree."""
    for rank, step in steps.items():
        group.boundary(rank, step)
    group.deliver()
    group.unanswered()
    group.deliver()


def test_a_step_without_losses_changes_nothing() -> None:
    member = Membership(0, 3, first_view(3))
    assert member.boundary(0) == member.waiting(1) == member.boundary(1) == ()
    assert not member.blocked


def test_survivors_adopt_one_view_from_the_earliest_step_on() -> None:
    group = Group(4)
    group.kill(1)
    _change(group, {0: 7, 2: 7})
    group.waiting(3, 8)
    group.deliver()
    group.unanswered()
    group.deliver()
    (view,) = group.adopted[0]
    assert (view.members, view.first_step, view.previous) == ((0, 2, 3), 7, 0)
    assert group.adopted == {0: [view], 1: [], 2: [view], 3: [view]}
    assert not any(group.ranks[rank].blocked for rank in (0, 2, 3))


def test_the_number_of_a_view_names_the_deciding_rank() -> None:
    group = Group(4)
    group.kill(0)
    _change(group, dict.fromkeys((1, 2, 3), 0))
    assert group.view(3).number == 1 * 4 + 1
    group.kill(1)
    _change(group, dict.fromkeys((2, 3), 5))
    assert group.view(3).number == 2 * 4 + 2


def test_a_rank_waits_until_another_begins_a_change() -> None:
    group = Group(3)
    group.kill(2)
    group.waiting(0, 5)
    assert not group.ranks[0].blocked
    group.boundary(1, 4)
    group.deliver()
    assert not group.ranks[0].blocked, "it computes"
    group.waiting(0, 5)
    assert group.ranks[0].blocked


def test_a_loss_during_a_change_is_reported_again() -> None:
    group = Group(5)
    group.kill(4)
    for rank in (0, 1, 2, 3):
        group.boundary(rank, 1)
    group.kill(3)
    group.deliver()
    group.unanswered()
    group.deliver()
    assert group.view(0).members == group.view(2).members == (0, 1, 2)


def test_the_decision_of_a_lost_leader_is_taken_from_members_that_have_it() -> None:
    group = Group(5)
    group.kill(4)
    for rank in (0, 1, 2, 3):
        group.boundary(rank, 1)
    group.deliver(only_to=0)
    group.unanswered()
    group.deliver(only_to=1)
    assert [rank for rank in group.ranks if group.adopted[rank]] == [0, 1]
    view = group.view(0)
    group.kill(0)
    group.deliver()
    assert group.view(2) == group.view(3) == view
    _change(group, dict.fromkeys((1, 2, 3), 1))
    assert group.view(3).members == (1, 2, 3)


def test_a_decision_is_passed_on_to_a_member_that_lost_its_leader_before() -> None:
    member = Membership(1, 4, first_view(4))
    member.lose(3, silent=True)
    member.boundary(1)
    member.received(2, Flush(0, 1, lost=(0, 3), closed=(0,)))
    view = View(number=4, previous=0, members=(0, 1, 2), newcomers=(), first_step=1)
    assert Send(2, view) in member.received(0, view)


def test_a_view_of_a_rank_that_is_lost_is_refused() -> None:
    group = Group(4)
    group.kill(3)
    for rank in (0, 1, 2):
        group.boundary(rank, 1)
    group.deliver(only_to=0)
    group.unanswered()
    for rank in (1, 2):
        group.do(rank, group.ranks[rank].lose(0, silent=True))
    group.deliver()
    group.unanswered()
    group.deliver()
    assert group.view(0).members == (0, 1, 2)
    assert group.view(1) == group.view(2)
    assert group.view(1).members == (1, 2)
    assert group.view(1).number != group.view(0).number


@pytest.mark.parametrize(
    ("silent", "goes"),
    [
        ((True, False), 3),  # rank 1 heard nothing from rank 3, and ended the connection
        ((False, True), 1),
        ((False, False), 3),
        ((True, True), 3),
    ],
)
def test_one_of_two_ranks_that_lost_each_other_is_excluded(
    silent: tuple[bool, bool], goes: int
) -> None:
    group = Group(5)
    group.do(1, group.ranks[1].lose(3, silent=silent[0]))
    group.do(3, group.ranks[3].lose(1, silent=silent[1]))
    group.boundary(1, 2)
    group.boundary(3, 2)
    for rank in (0, 2, 4):
        group.deliver()
        group.waiting(rank, 2)
    group.deliver()
    assert {each.rank for _, each in group.asks} == {goes}, "it may have gone on meanwhile"
    group.unanswered()
    group.deliver()
    stay = tuple(rank for rank in range(5) if rank != goes)
    assert [group.view(rank).members for rank in stay] == [stay] * 4
    assert {fenced for _, fenced in group.fenced} == {goes}


def test_the_report_of_one_rank_does_not_make_another_lost() -> None:
    member = Membership(2, 4, first_view(4))
    member.received(0, Flush(0, 1, lost=(3,), closed=(3,)))
    member.waiting(1)
    assert member.lost == frozenset()


@pytest.mark.parametrize("closed", [(), (2,)])
def test_a_rank_that_another_reports_as_lost_is_excluded(closed: tuple[int, ...]) -> None:
    member = Membership(2, 4, first_view(4))
    member.received(0, Flush(0, 1, lost=(2,), closed=closed))
    (end,) = member.waiting(1)
    assert isinstance(end, End)
    assert isinstance(member.ended, RankExcluded)


# --- asking


@pytest.mark.parametrize(
    ("ranks", "dead", "silent", "asked"),
    [
        (5, (4,), False, {4}),  # most survive: ranks whose connection ended are asked
        (5, (4,), True, set()),
        (4, (2, 3), True, {2, 3}),
        (5, (2, 3, 4), True, {2, 3, 4}),
    ],
)
def test_the_ranks_that_a_leader_asks(
    ranks: int, dead: tuple[int, ...], silent: bool, asked: set[int]
) -> None:
    group = Group(ranks)
    group.dead |= {*dead}
    for rank in group.alive():
        for each in dead:
            group.do(rank, group.ranks[rank].lose(each, silent=silent))
        group.boundary(rank, 0)
    group.deliver()
    assert {each.rank for _, each in group.asks} == asked
    assert bool(group.adopted[0]) == (not asked)


def test_few_survivors_also_ask_members_of_older_views() -> None:
    group = Group(4)
    group.kill(3)
    _change(group, dict.fromkeys((0, 1, 2), 0))
    group.kill(1, 2)
    group.boundary(0, 3)
    assert {each.rank for _, each in group.asks} == {1, 2, 3}


@pytest.mark.parametrize(
    ("survivors", "answer"),
    [
        ((1, 2, 3, 4, 5), Yield(0)),  # rank 0 is alone
        ((3, 4, 5), Yield(0)),
        ((4, 5), Yield(0)),
        ((5,), Wait(0)),  # as large as its own side, with the higher rank
    ],
)
def test_the_larger_side_goes_on(survivors: tuple[int, ...], answer: Yield | Wait) -> None:
    member = Membership(0, 6, first_view(6))
    for rank in range(1, 6):
        member.lose(rank, silent=False)
    reply, *rest = member.asked(Ask(5, 0, survivors))
    assert reply == Reply(5, answer)
    assert isinstance(member.ended, RankExcluded) == isinstance(answer, Yield) == bool(rest)


def test_a_rank_outside_of_the_later_view_is_excluded() -> None:
    group = Group(3)
    group.kill(2)
    _change(group, dict.fromkeys((0, 1), 4))
    assert group.ranks[1].asked(Ask(2, 0, (2,))) == (Reply(2, Excluded(3)),)
    assert group.ranks[1].ended is None


def test_the_smaller_of_two_halves_that_went_on_is_excluded() -> None:
    """The smaller half is excluded even if it has seen more views."""
    view = View(number=6, previous=0, members=(0, 1, 2), newcomers=(), first_step=1)
    larger, smaller = Membership(2, 6, view), Membership(2, 6, view)
    assert larger.asked(Ask(4, 16, (4, 5))) == (Reply(4, Excluded(6)),)
    assert smaller.asked(Ask(3, 15, (3, 4, 5, 1)))[0] == Reply(3, Yield(6))


def test_a_rank_that_is_excluded_tells_those_that_it_led() -> None:
    group = Group(6)
    group.dead |= {0, 1, 2}
    for rank in (3, 4, 5):
        for dead in (0, 1, 2):
            group.do(rank, group.ranks[rank].lose(dead, silent=False))
        group.boundary(rank, 0)
    group.deliver()
    ask = group.asks[0][1].ask
    assert group.ranks[3].answered(1, ask, Wait(0)) == (AskRank(1, ask, pause=True),)
    assert not isinstance(group.ranks[3].ended, RankExcluded)
    group.do(3, group.ranks[3].answered(1, ask, Excluded(6)))
    assert {send.rank for _, send in group.sent if isinstance(send.message, Ended)} == {4, 5}
    group.deliver()
    assert all(isinstance(group.ranks[rank].ended, RankExcluded) for rank in (3, 4, 5))


def test_a_group_of_fewer_than_min_ranks_ends() -> None:
    group = Group(4, min_ranks=3)
    group.kill(2, 3)
    _change(group, dict.fromkeys((0, 1), 0))
    assert all(isinstance(group.ranks[rank].ended, MoeGroupLost) for rank in (0, 1))
    assert not any(group.adopted.values())


# --- newcomers


def _set_up(group: Group, rank: int) -> Membership:
    """A process that takes the place of a rank that is not a member, connected to all ranks."""
    newcomer = Membership(rank, group.count, None)
    for member in group.alive():
        newcomer.newcomer(member)
        group.ranks[member].newcomer(rank)
    group.dead.discard(rank)
    group.ranks[rank] = newcomer
    group.adopted[rank] = []
    return newcomer


def _group_with_newcomer() -> Group:
    """A group of ranks 0, 2 and 3, and an announced newcomer in the place of rank 1."""
    group = Group(4)
    group.kill(1)
    _change(group, dict.fromkeys((0, 2, 3), 5))
    group.do(1, _set_up(group, 1).announce())
    group.deliver()
    return group


def test_a_newcomer_begins_with_the_first_step_of_the_next_view() -> None:
    group = _group_with_newcomer()
    group.boundary(0, 9)
    group.deliver()
    for rank in (2, 3):
        group.waiting(rank, 9)
    group.deliver()
    (view,) = group.adopted[1]
    assert (view.members, view.newcomers, view.first_step) == ((0, 1, 2, 3), (1,), 9)
    assert all(group.view(rank) == view for rank in range(4))


@pytest.mark.parametrize("rank", [0, 2])
def test_only_the_leader_begins_a_change_for_a_newcomer(rank: int) -> None:
    group = _group_with_newcomer()
    group.boundary(rank, 6)
    assert group.ranks[rank].blocked == (rank == 0)


def test_a_newcomer_that_a_member_lost_is_not_admitted_nor_tried_again() -> None:
    group = _group_with_newcomer()
    group.do(3, group.ranks[3].lose(1, silent=False))
    group.boundary(0, 6)
    group.deliver()
    for rank in (2, 3):
        group.waiting(rank, 6)
    group.deliver()
    assert group.view(0).members == (0, 2, 3)
    group.boundary(0, 7)
    assert not group.ranks[0].blocked


def test_of_two_newcomers_that_do_not_know_each_other_one_is_admitted() -> None:
    group = Group(4)
    group.kill(1, 3)
    _change(group, dict.fromkeys((0, 2), 5))
    newcomers = [Membership(rank, 4, None) for rank in (1, 3)]
    for newcomer in newcomers:
        for member in (0, 2):
            newcomer.newcomer(member)
            group.ranks[member].newcomer(newcomer.rank)
        group.do(newcomer.rank, newcomer.announce())
    group.dead.clear()
    group.ranks |= {newcomer.rank: newcomer for newcomer in newcomers}
    group.deliver()
    _change(group, {0: 6, 2: 6})
    group.waiting(2, 6)
    group.deliver()
    assert group.view(0).members == (0, 1, 2)


def _leader_decides(group: Group) -> None:
    """Makes rank 0 decide; its VIEW is in flight."""
    group.boundary(0, 6)
    group.deliver()
    group.waiting(2, 6)
    group.waiting(3, 6)
    group.deliver(only_to=0)


def test_members_tell_a_newcomer_its_view_if_the_leader_is_lost() -> None:
    group = _group_with_newcomer()
    _leader_decides(group)
    group.deliver(only_to=2)
    assert not group.adopted[1]
    group.sent = [each for each in group.sent if each[0] != 0]
    group.kill(0)
    group.deliver()
    assert group.view(1) == group.view(2)


def test_a_newcomer_whose_view_no_other_rank_has_is_excluded() -> None:
    group = _group_with_newcomer()
    _leader_decides(group)
    group.deliver(only_to=1)
    assert group.view(1).members == (0, 1, 2, 3)
    group.sent = [each for each in group.sent if each[0] != 0]
    group.kill(0)
    group.waiting(1, 7)
    group.deliver()
    group.unanswered()
    group.deliver()
    assert group.view(2).members in ((2, 3), (1, 2, 3))
    assert isinstance(group.ranks[1].ended, RankExcluded)


def test_a_newcomer_that_two_halves_admitted_leaves_one() -> None:
    newcomer = Membership(1, 5, None)
    for rank in (0, 2, 3, 4):
        newcomer.newcomer(rank)
    newcomer.received(
        0, View(number=5, previous=0, members=(0, 1, 2), newcomers=(1,), first_step=3)
    )
    other = View(number=8, previous=0, members=(1, 3, 4), newcomers=(1,), first_step=4)
    assert newcomer.received(3, other) == (Fence(3),)


def test_a_rank_that_is_a_member_is_no_newcomer() -> None:
    with pytest.raises(InvalidArgument, match="rank 1 is a member of view 0"):
        Membership(0, 2, first_view(2)).newcomer(1)


# --- steps that a rank refuses


def _agree(group: Group, next_steps: dict[int, int]) -> None:
    """Delivers refusals, and makes these ranks wait."""
    group.deliver()
    for rank, step in next_steps.items():
        group.waiting(rank, step)
    group.deliver()


def test_a_refused_step_is_left_out_by_all_members() -> None:
    group = Group(3)
    group.refuse(2, 7, "bad ids")
    _agree(group, {1: 8})
    assert group.view(0).number == 0, "rank 0 computes"
    _agree(group, {0: 7})
    (view,) = group.adopted[0]
    assert view.refused == (Refusal(7, 2, "bad ids"),)
    assert (view.members, view.first_step) == ((0, 1, 2), 7)
    assert group.adopted == {rank: [view] for rank in range(3)}
    assert not any(group.ranks[rank].blocked for rank in range(3))


def test_a_group_of_one_leaves_a_refused_step_out_at_once() -> None:
    group = Group(1)
    group.refuse(0, 3)
    assert group.view(0).refused == (Refusal(3, 0, "why"),)


def test_the_lower_of_two_ranks_that_refuse_a_step_is_named() -> None:
    group = Group(3)
    group.refuse(2, 7, "second")
    group.refuse(1, 7, "first")
    _agree(group, {0: 8})
    assert group.view(2).refused == (Refusal(7, 1, "first"),)


def test_two_may_refuse_different_steps() -> None:
    group = Group(3)
    group.refuse(2, 8, "the later")
    group.refuse(1, 7, "the earlier")
    _agree(group, {0: 8})
    assert group.view(0).refused == (Refusal(7, 1, "the earlier"), Refusal(8, 2, "the later"))
    assert group.view(0).first_step == 7


def test_later_views_repeat_refusals_of_steps_that_some_rank_has_before_it() -> None:
    group = Group(2)
    group.refuse(1, 7)
    _agree(group, {0: 6})
    group.refuse(1, 8)
    _agree(group, {0: 6})
    assert [each.step for each in group.view(0).refused] == [7, 8]
    group.refuse(1, 9)
    _agree(group, {0: 8})
    assert [each.step for each in group.view(0).refused] == [8, 9]


def test_if_the_refusing_rank_is_lost_first_the_step_is_run_without_it() -> None:
    group = Group(3)
    group.refuse(2, 7)
    _agree(group, {1: 8})
    group.kill(2)
    _change(group, {0: 7})
    assert group.view(1).members == (0, 1)
    assert group.view(1).refused == ()


def test_refusals_are_bounded_by_what_a_message_holds() -> None:
    group = Group(2)
    for step in range(MOST_REFUSALS + 5):
        group.refuse(1, step, "x" * 2 * MOST_WHY)
        _agree(group, {0: 0})
    assert len(group.view(0).refused) == MOST_REFUSALS
    assert {len(each.why) for each in group.view(0).refused} == {MOST_WHY}
    assert not group.ranks[1].blocked
