"""The connected peers of an endpoint, and the ways to connect to them. The ranks of an instance
learn its epoch from the HELLOs of its first rank, which registers it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvxfer.clock import Clock
from kvxfer.errors import (
    ConnectFailed,
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    KvxferError,
    PeerLost,
)
from kvxfer.instances import Role
from kvxfer.kv.admission import named, require_peer
from kvxfer.kv.connection import Connection, hello_from
from kvxfer.kv.messages import Hello
from kvxfer.kv.ranks import sources
from kvxfer.kv.waiting import LostWorkers

if TYPE_CHECKING:
    from kvxfer.engine import Engine, Peer
    from kvxfer.kv.admission import CurrentIdentity
    from kvxfer.kv.cache import KvCache
    from kvxfer.ticket import Ticket

# The end of an address of any engine that answers there; a KV endpoint needs a specific one.
_ANY_ENGINE: Final = "/" + "0" * 32


class Connections:
    """The connection to each peer of the engine. Loop only."""

    def __init__(
        self,
        engine: Engine,
        cache: KvCache,
        identity: CurrentIdentity,
        connect_timeout: float,
        *,
        checksums: bool,
        clock: Clock,
    ) -> None:
        self.connect_timeout = connect_timeout
        self._engine = engine
        self._cache = cache
        self._identity = identity
        self.on_unreachable: Callable[[Connection, KvxferError], object] | None = None
        """Called if a peer accepts no message any more; has to end the connection."""
        self._checksums = checksums
        self._clock = clock
        self._connections: dict[int, Connection] = {}
        self._lost = LostWorkers(clock)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections.values()))

    def get(self, peer: Peer) -> Connection | None:
        return self._connections.get(peer.id)

    def of(self, peer: Peer) -> Connection:
        """Returns the connection to a peer; a new one is greeted."""
        connection = self._connections.get(peer.id)
        if connection is None:
            connection = self._connections[peer.id] = Connection(
                peer,
                self._cache,
                self._unreachable,
                identity=self._identity,
                clock=self._clock,
                checksums=self._checksums,
            )
            self._greet(connection)
        return connection

    def greet_all(self) -> None:
        """Tells every peer of a new epoch or model."""
        for connection in self:
            self._greet(connection)

    def remove(self, connection: Connection, error: KvxferError) -> None:
        """Removes a connection that has ended."""
        self._connections.pop(connection.peer.id, None)
        connection.lose(error)
        if connection.named is not None:
            self._lost.add(connection.named, connection.hello.layout.rank, error)

    def loss_of_decode(self, ticket: Ticket) -> KvxferError | None:
        """Returns why no OFFER can come under a ticket: a rank of its decode worker was lost after
        the ticket was issued, and has not connected again. None if there is no such rank."""
        decode = named(ticket, Role.DECODE)
        lost = self._lost.since(decode, ticket.issued_at)
        if not lost:
            return None
        for connection in self:
            if connection.named == decode:
                lost.pop(connection.hello.layout.rank, None)
        for error in lost.values():
            what = f"transfer {ticket.transfer_id}: decode worker {ticket.decode_id!r} was lost"
            return type(error)(f"{what} before the prefill request came: {error}")
        return None

    async def meet(self, address: str) -> Connection:
        """Returns the peer at an address, connected and greeted.

        Raises ConnectFailed, PeerRestarted and other EngineErrors of the connection, or
        DeadlineExceeded if no KV endpoint answers there.
        """
        if address.endswith(_ANY_ENGINE):
            raise ConnectFailed(
                f"{address} names no engine: its id is zero; pass the address that the engine gives"
            )
        give_up = self._clock.monotonic() + self.connect_timeout
        peer = await self._engine.connect(address, timeout=self.connect_timeout)
        if not peer.alive:
            raise peer.error or PeerLost(f"the engine at {address} was lost while connecting to it")
        connection = self.of(peer)
        try:
            # Not wait_for(): before Python 3.12 it forgets that it was cancelled if the HELLO comes
            # at that moment.
            async with asyncio.timeout(give_up - self._clock.monotonic()):
                await connection.greeted()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine at {address} did not introduce a KV cache within "
                f"{self.connect_timeout:g} s; does a KvEndpoint run there?"
            ) from None
        if connection.error is not None:
            raise connection.error
        return connection

    async def meet_sources(
        self, ticket: Ticket, addresses: str | Sequence[str]
    ) -> tuple[Connection, ...]:
        """Returns the ranks of a ticket's prefill worker that write to this cache, in order.

        `addresses` are those of all its ranks, in order; a single one may be a string. Raises as
        meet() does, TicketInvalid if another worker is there, LayoutMismatch, and InvalidArgument
        if an address is missing or belongs to another rank.
        """
        layout = self._cache.layout
        addresses = [addresses] if isinstance(addresses, str) else addresses
        # Any rank's layout shows which ones they are: ask one that is likely to be among them.
        first = await self._meet_prefill(
            ticket, addresses[layout.rank * len(addresses) // layout.num_ranks]
        )
        theirs = first.hello.layout
        ranks = sources(theirs, layout)
        if ranks == (theirs.rank,):
            return (first,)
        if len(addresses) != theirs.num_ranks:
            raise InvalidArgument(
                f"{len(addresses)} engine addresses of prefill worker "
                f"{first.hello.instance_id!r} with its {theirs.num_ranks} ranks; "
                f"{', '.join(map(str, ranks))} write to rank {layout.rank} here; pass the address "
                "of each of its ranks, in their order"
            )
        connections = await asyncio.gather(
            *(self._meet_prefill(ticket, addresses[rank]) for rank in ranks)
        )
        for rank, connection in zip(ranks, connections, strict=True):
            if connection.error is not None:
                raise connection.error  # lost while the others were met
            if connection.hello.layout != theirs.of_rank(rank):
                raise InvalidArgument(
                    f"the engine at {addresses[rank]} is rank {connection.hello.layout.rank} of "
                    f"{connection.hello.instance_id!r} and not rank {rank}; pass the addresses in "
                    "the order of the ranks, which have layouts that differ in nothing else"
                )
        return tuple(connections)

    async def _meet_prefill(self, ticket: Ticket, address: str) -> Connection:
        connection = await self.meet(address)
        require_peer(ticket, Role.PREFILL, connection.hello, f"at {address} is")
        return connection

    def _unreachable(self, connection: Connection, error: KvxferError) -> None:
        if self.on_unreachable is not None:
            self.on_unreachable(connection, error)

    def _greet(self, connection: Connection) -> None:
        # A peer that is already lost is reported through peer_lost().
        with contextlib.suppress(EngineError):
            connection.send(hello_from(self._cache, self._identity, checksums=self._checksums))


_REGISTRATION_SECONDS: Final = 60.0


async def follow_first_rank(
    connections: Connections,
    identity: CurrentIdentity,
    address: str,
    set_epoch: Callable[[int], None],
) -> Peer:
    """Takes the epoch of the first rank, whose engine is at `address`, and each later one while the
    connection lasts. Returns when it has one.

    Raises as Connections.meet(), InvalidArgument if another instance is there, and
    DeadlineExceeded if the first rank is not registered within a minute.
    """
    connection = await connections.meet(address)
    if connection.hello.instance_id != identity.instance_id:
        raise InvalidArgument(
            f"the engine at {address} is of instance {connection.hello.instance_id!r}, not of "
            f"{identity.instance_id!r}; pass the address of this instance's first rank"
        )
    known = asyncio.Event()

    def take(hello: Hello) -> None:
        if hello.epoch:
            known.set()
        if hello.epoch > identity.epoch:
            set_epoch(hello.epoch)

    connection.on_hello = take
    take(connection.hello)
    connection.peer.on_lost(lambda _: known.set())
    try:
        async with asyncio.timeout(_REGISTRATION_SECONDS):
            await known.wait()
    except TimeoutError:
        raise DeadlineExceeded(
            f"the first rank of {identity.instance_id!r}, at {address}, was not registered within "
            f"{_REGISTRATION_SECONDS:g} s"
        ) from None
    if connection.peer.error is not None:
        raise connection.peer.error
    return connection.peer
