"""The invariants of a transfer, which must hold at every moment."""

from __future__ import annotations

from kvxfer.instances import Role
from kvxfer.kv.block_pool import BlockState
from kvxfer.ticket import Ticket

from .contents import Array
from .process import Process
from .world import World

_MAY_BE_WRITTEN = (BlockState.OFFERED, BlockState.RECEIVING)


class Oracle:
    """A judge that hears of all bytes that are read and placed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tickets: dict[str, Ticket] = {}
        """The tickets of all transfers."""
        self.to_damage: set[str] = set()
        """The transfers with a byte that changes under way."""
        self.damaged: set[str] = set()

    def posts(self, process: Process, data: Array) -> str:
        """Checks a posted write. Returns the transfer that its blocks belong to."""
        owners = {process.pool.owners.get(block) for block in _blocks(process, data)}
        self._world.require(
            len(owners) == 1 and None not in owners,
            f"{process.name} posts a write out of blocks of {sorted(map(str, owners))}",
        )
        return str(owners.pop())

    def reads(self, process: Process, transfer: str, source: Array) -> None:
        """Checks a read. The bytes must be in blocks that the transfer still has."""
        for block in _blocks(process, source):
            owner, state = process.pool.owners.get(block), process.pool.state(block)
            self._world.require(
                owner == transfer and state is BlockState.HELD,
                f"{process.name} reads block {block} for {transfer}, which is "
                f"{state.name.lower()} for {owner}",
            )

    def lands(self, writer: Process, process: Process, transfer: str, place: Array) -> None:
        """Checks placed bytes. They must be in blocks offered to this writer for this transfer."""
        for block in _blocks(process, place):
            owner, state = process.pool.owners.get(block), process.pool.state(block)
            self._world.require(
                owner == transfer and state in _MAY_BE_WRITTEN,
                f"a write of {writer.name} for {transfer} lands in block {block} "
                f"of {process.name}, which is {state.name.lower()} for {owner}",
            )
        self.takes_part(writer, transfer)

    def damages(self, transfer: str, place: Array) -> None:
        """Changes a byte under way if the transfer has that fault."""
        if transfer in self.to_damage:
            place[len(place) // 2] ^= 1
            self.damaged.add(transfer)

    def takes_part(self, process: Process, transfer: str) -> None:
        """Checks a session of a process. The ticket must name that process and its epoch."""
        named = _named(self.tickets[transfer], process.instance.role)
        self._world.require(
            named is None or named in [(process.instance.name, epoch) for epoch in process.epochs],
            f"{process.name} of epochs {process.epochs} takes part in {transfer}, whose ticket "
            f"names {named}",
        )


def _named(ticket: Ticket, side: Role) -> tuple[str, int] | None:
    """Returns instance and epoch of one side; None if the ticket does not name it."""
    if side is Role.PREFILL:
        return ticket.prefill_id, ticket.prefill_epoch
    return None if ticket.bearer else (ticket.decode_id, ticket.decode_epoch)


def _blocks(process: Process, data: Array) -> range:
    """Returns the blocks of a process's cache that contain these bytes."""
    size, plane = process.block_bytes, process.plane_bytes
    begin = data.__array_interface__["data"][0] - process.base_address
    return range(begin % plane // size, (begin + len(data) - 1) % plane // size + 1)
