"""The connected peers of an endpoint, and how they are met."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvxfer.errors import DeadlineExceeded, EngineError, KvxferError, PeerLost
from kvxfer.kv.pair import KvPair, hello_from

if TYPE_CHECKING:
    from kvxfer.engine import Engine, Peer
    from kvxfer.kv.cache import KvCache
    from kvxfer.kv.identity import Identity


class Pairs:
    """A KvPair for each peer of the engine. Loop only."""

    def __init__(
        self, engine: Engine, cache: KvCache, identity: Identity, connect_timeout: float
    ) -> None:
        self.connect_timeout = connect_timeout
        self._engine = engine
        self._cache = cache
        self._identity = identity
        self._pairs: dict[int, KvPair] = {}

    def __iter__(self) -> Iterator[KvPair]:
        return iter(list(self._pairs.values()))

    def get(self, peer: Peer) -> KvPair | None:
        return self._pairs.get(peer.id)

    def of(self, peer: Peer) -> KvPair:
        """The pair of a connected peer, which is greeted when it is new."""
        pair = self._pairs.get(peer.id)
        if pair is None:
            pair = self._pairs[peer.id] = KvPair(peer, self._cache)
            self._greet(pair)
        return pair

    def greet_all(self) -> None:
        """Tells every peer of a new epoch."""
        for pair in self:
            self._greet(pair)

    def remove(self, pair: KvPair, error: KvxferError) -> None:
        """The connection has ended."""
        self._pairs.pop(pair.peer.id, None)
        pair.lose(error)

    async def meet(self, address: str) -> KvPair:
        """The peer at an address, connected and greeted.

        Raises ConnectFailed, PeerRestarted and other EngineErrors of the connection, or
        DeadlineExceeded where no KV endpoint answers there.
        """
        peer = await self._engine.connect(address, timeout=self.connect_timeout)
        if not peer.alive:
            raise peer.error or PeerLost(f"the engine at {address} was lost while connecting to it")
        pair = self.of(peer)
        try:
            await asyncio.wait_for(pair.greeted(), self.connect_timeout)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine at {address} did not introduce a KV cache within "
                f"{self.connect_timeout:g} s; does a KvEndpoint run there?"
            ) from None
        if pair.error is not None:
            raise pair.error
        return pair

    def _greet(self, pair: KvPair) -> None:
        # A peer that is lost by now is reported through peer_lost().
        with contextlib.suppress(EngineError):
            identity = self._identity
            pair.send(
                hello_from(self._cache, instance_id=identity.instance_id, epoch=identity.epoch)
            )
