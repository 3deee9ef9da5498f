"""The invariants of a transfer, which must hold at every moment."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

from kvxfer.kv.block_pool import BlockIds, BlockPool, BlockState

if TYPE_CHECKING:
    from .link import End
    from .process import Process
    from .requests import Request
    from .writes import Bytes, Write

TRANSFER: contextvars.ContextVar[str] = contextvars.ContextVar("transfer")
"""The id of the request that a task serves."""

_MAY_BE_WRITTEN = (BlockState.OFFERED, BlockState.RECEIVING)


class Violation(Exception):
    """A promise was broken."""


class OwnedPool(BlockPool):
    """A pool that records which transfer has each block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.owners: dict[int, str] = {}

    def _pop(self, count: int, to: BlockState, owned: BlockIds) -> BlockIds:
        ids = super()._pop(count, to, owned)
        self.owners.update(dict.fromkeys(ids[len(owned) :].tolist(), TRANSFER.get()))
        return ids

    def _push(self, ids: BlockIds) -> None:
        super()._push(ids)
        for block in ids.tolist():
            del self.owners[block]


class Oracle:
    """A judge that hears of all bytes that are read and placed. The network's owner tells it the
    requests."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.violations: list[str] = []
        self.damaged: set[str] = set()

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            self.violations.append(text)
            raise Violation(text)

    def posts(self, end: End, data: Bytes) -> str:
        """Checks a posted write. Returns the transfer that its blocks belong to."""
        process = end.native.process
        owners = {process.pool.owners.get(block) for block in _blocks(process, data)}
        self.require(
            len(owners) == 1 and None not in owners,
            f"{process.name} posts a write out of blocks of {sorted(map(str, owners))}",
        )
        return str(owners.pop())

    def reads(self, end: End, write: Write) -> None:
        """Checks a read. The bytes must be in blocks that the transfer still has."""
        process = end.native.process
        for block in _blocks(process, write.source):
            owner, state = process.pool.owners.get(block), process.pool.state(block)
            self.require(
                owner == write.transfer and state is BlockState.HELD,
                f"{process.name} reads block {block} for {write.transfer}, which is "
                f"{state.name.lower()} for {owner}",
            )

    def lands(self, end: End, write: Write, place: Bytes) -> None:
        """Checks placed bytes. They must be in blocks offered to this writer for this transfer."""
        process = end.other.native.process
        for block in _blocks(process, place):
            owner, state = process.pool.owners.get(block), process.pool.state(block)
            self.require(
                owner == write.transfer and state in _MAY_BE_WRITTEN,
                f"a write of {end.native.process.name} for {write.transfer} lands in block {block} "
                f"of {process.name}, which is {state.name.lower()} for {owner}",
            )
        self.takes_part(end.native.process, write.transfer)

    def damages(self, write: Write, place: Bytes) -> None:
        """Changes a byte under way if the transfer has that fault."""
        request = self.requests[write.transfer]
        if request.fault == "byte changed":
            place[len(place) // 2] ^= 1
            self.damaged.add(request.id)

    def takes_part(self, process: Process, transfer: str) -> None:
        """Checks a session of a process. The ticket must name that process and its epoch."""
        named = self.requests[transfer].named(process.instance.role)
        self.require(
            named is None or named in [(process.instance.name, epoch) for epoch in process.epochs],
            f"{process.name} of epochs {process.epochs} takes part in {transfer}, whose ticket "
            f"names {named}",
        )


def _blocks(process: Process, data: Bytes) -> range:
    """Returns the blocks of a process's cache that contain these bytes."""
    size, plane = process.block_bytes, process.plane_bytes
    begin = data.__array_interface__["data"][0] - process.base_address
    return range(begin % plane // size, (begin + len(data) - 1) % plane // size + 1)
