"""Writes to several peers in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvxfer.engine.arguments import REFUSALS, refused
from kvxfer.engine.operation import Scattered
from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    from kvxfer.engine.arguments import Descriptor, Imm, Integers, Seconds
    from kvxfer.engine.core import EngineCore
    from kvxfer.engine.memory import Region
    from kvxfer.engine.peer import Peer
    from kvxfer.engine.watcher import WatchFor


class PeerGroup:
    """Peers of one engine, in an order that every call keeps. Any thread.

    Each call is one operation, which is submitted as a whole or not at all. It raises as Peer.write
    does, also if any of the peers is lost.
    """

    __slots__ = ("_engine", "peers")

    def __init__(self, engine: EngineCore, peers: Sequence[Peer]) -> None:
        try:
            for peer in peers:
                if peer.engine is not engine:
                    raise InvalidArgument(f"{peer!r} is a peer of another engine than the group's")
            self.peers = tuple(peers)
        except REFUSALS as error:
            raise refused(error, PeerGroup.__init__, locals()) from None
        self._engine = engine

    def scatter(
        self,
        src: Region,
        dst: Sequence[Descriptor],
        *,
        src_offsets: Integers,
        dst_offsets: Integers,
        lengths: Integers,
        imm: Imm | None = None,
        timeout: Seconds | None = None,
        after: WatchFor | None = None,
    ) -> Scattered:
        """Writes to each peer its part of `src`: lengths[i] bytes from src_offsets[i] to
        dst_offsets[i] of the region dst[i] (a descriptor) of peers[i].

        A length of 0 sends only the immediate. imm, timeout, after: as for Peer.write, the same for
        all peers.
        """
        ids = self._connected()
        try:
            submitted = self._engine.native.scatter(
                src.handle,
                ids,
                dst,
                source_offsets=src_offsets,
                destination_offsets=dst_offsets,
                lengths=lengths,
                imm=imm,
                timeout=timeout,
                after=after,
            )
        except REFUSALS as error:
            raise refused(error, PeerGroup.scatter, locals()) from None
        return self._engine._track(Scattered(self._engine.native, *submitted))

    def barrier(
        self, imm: Imm, *, timeout: Seconds | None = None, after: WatchFor | None = None
    ) -> Scattered:
        """Counts one at every peer, without any bytes: this engine's part of a barrier in which
        each engine waits for one count of every other."""
        ids = self._connected()
        try:
            submitted = self._engine.native.barrier(ids, imm, timeout=timeout, after=after)
        except REFUSALS as error:
            raise refused(error, PeerGroup.barrier, locals()) from None
        return self._engine._track(Scattered(self._engine.native, *submitted))

    def _connected(self) -> list[int]:
        for peer in self.peers:
            peer._require_connected()
        return [peer.id for peer in self.peers]

    def __len__(self) -> int:
        return len(self.peers)
