"""The connected peers of an endpoint: how they are met, and who waits for one to connect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.errors import (
    DeadlineExceeded,
    EngineError,
    KvxferError,
    LeaseExpired,
    PeerLost,
)
from kvxfer.instances import Role
from kvxfer.kv.identity import named, require_peer
from kvxfer.kv.messages import Hello
from kvxfer.kv.pair import KvPair, hello_from

if TYPE_CHECKING:
    from kvxfer.engine import Engine, Peer
    from kvxfer.kv.cache import KvCache
    from kvxfer.kv.identity import Identity
    from kvxfer.ticket import Ticket


@dataclass(eq=False, slots=True)
class _Expected:
    """Somebody waits until the prefill worker of a ticket has connected in."""

    ticket: Ticket
    arrived: asyncio.Future[KvPair]

    def look_at(self, pair: KvPair) -> None:
        instance_id, epoch = named(self.ticket, Role.PREFILL)
        hello = pair.hello
        if self.arrived.done() or hello.instance_id != instance_id or hello.epoch < epoch:
            return
        try:
            require_peer(self.ticket, Role.PREFILL, hello, "connected is")
        except KvxferError as error:
            self.arrived.set_exception(error)
        else:
            self.arrived.set_result(pair)


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
        self._expected: set[_Expected] = set()

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

    def greeted(self, pair: KvPair, hello: Hello) -> None:
        """A peer has said HELLO. Raises ProtocolError."""
        pair.greet(hello)
        for expected in self._expected:
            expected.look_at(pair)

    def remove(self, pair: KvPair, error: KvxferError) -> None:
        """The connection has ended."""
        self._pairs.pop(pair.peer.id, None)
        pair.lose(error)

    def give_up(self, error: KvxferError) -> None:
        """Nobody is to connect in any more."""
        for expected in self._expected:
            if not expected.arrived.done():
                expected.arrived.set_exception(error)

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

    async def arrival(self, ticket: Ticket, seconds: float) -> KvPair:
        """The prefill worker of a ticket, once it has connected in and greeted.

        Raises LeaseExpired after `seconds`, TicketInvalid where it comes with a later epoch, and
        what ended the connection just then.
        """
        expected = _Expected(ticket, asyncio.get_running_loop().create_future())
        self._expected.add(expected)
        for pair in self:
            if pair.is_greeted:
                expected.look_at(pair)
        try:
            async with asyncio.timeout(seconds):
                pair = await expected.arrived
        except TimeoutError:
            raise LeaseExpired(
                f"transfer {ticket.transfer_id}: prefill worker {ticket.prefill_id!r} of epoch "
                f"{ticket.prefill_epoch} did not connect within {seconds:g} s; send its request "
                "with the handshake brokered and the address of this engine"
            ) from None
        finally:
            self._expected.discard(expected)
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
