"""A model of the mesh: a simulated newcomer connects to the members."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group
    from .rank import Rank


class Joining:
    """The steps of a newcomer: it asks a member for the list of members, connects to each, and
    announces itself."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def turn(self, newcomer: Rank) -> None:
        """Runs one turn of a newcomer, which repeats turns until it is admitted."""
        group = self._group
        members = [rank for rank in group.ranks if self._is_member(rank)]
        if not members:
            return
        known = group.random.choice(members)
        view = known.machine.view
        if view is None or newcomer.rank in view.members:
            return  # the newcomer's place is not free yet
        wanted = [group.ranks[rank] for rank in view.members]
        for member in wanted:
            if not self._is_set_up(newcomer, member):
                self._dial(newcomer, member)
        others = [rank for rank in group.ranks if rank.newcomer and rank.machine.view is None]
        for other in others:
            if other.rank >= newcomer.rank or group.random.random() < 0.5:
                continue
            if other.alive and not self._is_set_up(newcomer, other):
                self._dial(newcomer, other)
        if all(self._is_set_up(newcomer, member) for member in wanted):
            newcomer._do(newcomer.machine.announce())

    def _is_member(self, rank: Rank) -> bool:
        return rank.runs and rank.machine.view is not None and rank.machine.ended is None

    def _is_set_up(self, newcomer: Rank, member: Rank) -> bool:
        connection = newcomer.connections.get(member.rank)
        return (
            connection is not None
            and connection.other(newcomer) is member
            and connection.open[newcomer]
            and connection.open[member]
        )

    def _dial(self, newcomer: Rank, member: Rank) -> None:
        group = self._group
        if group.network.cut_until(newcomer, member) or not member.runs:
            return
        group.clock.after(
            group.network.delay(),
            lambda: member.meets(("join", newcomer)),
            member,  # type: ignore[arg-type]
        )

    def hello(self, member: Rank, newcomer: Rank) -> None:
        """Accepts a newcomer at a member, if the newcomer's place is free."""
        view = member.machine.view
        if not newcomer.alive or self._is_set_up(newcomer, member):
            return
        if view is not None and newcomer.rank in view.members:
            return
        if member.machine.ended is not None or newcomer.machine.view is not None:
            return
        self._group.connect(newcomer, member, local=False)
        self._group.trace(member, f"is set up with {newcomer.name}")
        member._do(member.machine.newcomer(newcomer.rank))
        connection = member.connections[newcomer.rank]
        connection._carry(newcomer, "said", lambda: newcomer.meets(("joined", member.rank)))
