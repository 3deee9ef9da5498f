"""A model of the mesh: a simulated newcomer asks a member for the list of members, connects to each
of them, and announces itself."""

from __future__ import annotations

from .network import Process
from .world import World


def turn(world: World, newcomer: Process) -> bool:
    """Runs one turn of a newcomer, which repeats turns until it is admitted. Returns whether it is
    set up with all members, and announces itself."""
    members = [rank for rank in world.ranks if _is_member(rank)]
    if not members:
        return False
    known = world.random.choice(members)
    view = known.machine.view
    if view is None or newcomer.rank in view.members:
        return False  # the newcomer's place is not free yet
    wanted = [world.ranks[rank] for rank in view.members]
    for member in wanted:
        if not _is_set_up(newcomer, member):
            _dial(world, newcomer, member)
    others = [rank for rank in world.ranks if rank.newcomer and rank.machine.view is None]
    for other in others:
        if other.rank >= newcomer.rank or world.random.random() < 0.5:
            continue
        if other.alive and not _is_set_up(newcomer, other):
            _dial(world, newcomer, other)
    return all(_is_set_up(newcomer, member) for member in wanted)


def accepts(world: World, member: Process, newcomer: Process) -> bool:
    """Connects a newcomer to a member, if the newcomer's place is free. Returns whether it is."""
    view = member.machine.view
    if not newcomer.alive or _is_set_up(newcomer, member):
        return False
    if view is not None and newcomer.rank in view.members:
        return False
    if member.machine.ended is not None or newcomer.machine.view is not None:
        return False
    world.connect(newcomer, member, local=False)
    world.trace(member, f"is set up with {newcomer.name}")
    return True


def tell(member: Process, newcomer: Process) -> None:
    """Tells a newcomer that a member is set up with it."""
    connection = member.connections[newcomer.rank]
    connection.carry(newcomer, "said", lambda: newcomer.meets(("joined", member.rank)))


def _is_member(rank: Process) -> bool:
    return rank.runs and rank.machine.view is not None and rank.machine.ended is None


def _is_set_up(newcomer: Process, member: Process) -> bool:
    connection = newcomer.connections.get(member.rank)
    return (
        connection is not None
        and connection.other(newcomer) is member
        and connection.open[newcomer]
        and connection.open[member]
    )


def _dial(world: World, newcomer: Process, member: Process) -> None:
    if world.network.cut_until(newcomer, member) or not member.runs:
        return
    event = ("join", newcomer)
    world.clock.after(world.network.delay(), lambda: member.meets(event), member)
