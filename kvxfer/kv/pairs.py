"""The connected peers of an endpoint, and how they are met; how the ranks of an instance learn its
epoch: from the HELLOs of its first rank, which registers it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvxfer.clock import Clock
from kvxfer.errors import DeadlineExceeded, EngineError, InvalidArgument, KvxferError, PeerLost
from kvxfer.instances import Role
from kvxfer.kv.admission import named, require_peer
from kvxfer.kv.messages import Hello
from kvxfer.kv.pair import KvPair, hello_from
from kvxfer.kv.ranks import sources
from kvxfer.kv.waiting import LostWorkers

if TYPE_CHECKING:
    from kvxfer.engine import Engine, Peer
    from kvxfer.kv.admission import Identity
    from kvxfer.kv.cache import KvCache
    from kvxfer.ticket import Ticket


class Pairs:
    """A KvPair for each peer of the engine. Loop only."""

    def __init__(
        self,
        engine: Engine,
        cache: KvCache,
        identity: Identity,
        connect_timeout: float,
        unreachable: Callable[[KvPair, KvxferError], object],
        *,
        checksums: bool,
        clock: Clock,
    ) -> None:
        self.connect_timeout = connect_timeout
        self._engine = engine
        self._cache = cache
        self._identity = identity
        self._unreachable = unreachable
        self._checksums = checksums
        self._clock = clock
        self._pairs: dict[int, KvPair] = {}
        self._lost = LostWorkers(clock)

    def __iter__(self) -> Iterator[KvPair]:
        return iter(list(self._pairs.values()))

    def get(self, peer: Peer) -> KvPair | None:
        return self._pairs.get(peer.id)

    def of(self, peer: Peer) -> KvPair:
        """The pair of a connected peer, which is greeted when it is new."""
        pair = self._pairs.get(peer.id)
        if pair is None:
            pair = self._pairs[peer.id] = KvPair(
                peer,
                self._cache,
                self._unreachable,
                identity=self._identity,
                clock=self._clock,
                checksums=self._checksums,
            )
            self._greet(pair)
        return pair

    def greet_all(self) -> None:
        """Tells every peer of a new epoch or model."""
        for pair in self:
            self._greet(pair)

    def remove(self, pair: KvPair, error: KvxferError) -> None:
        """The connection has ended."""
        self._pairs.pop(pair.peer.id, None)
        pair.lose(error)
        if pair.named is not None:
            self._lost.add(pair.named, pair.hello.layout.rank, error)

    def loss_of_decode(self, ticket: Ticket) -> KvxferError | None:
        """Why no OFFER comes with a ticket: a rank of its decode worker was lost after it was
        issued, and has not connected anew."""
        decode = named(ticket, Role.DECODE)
        lost = self._lost.since(decode, ticket.issued_at)
        if not lost:
            return None
        for pair in self:
            if pair.named == decode:
                lost.pop(pair.hello.layout.rank, None)
        for error in lost.values():
            what = f"transfer {ticket.transfer_id}: decode worker {ticket.decode_id!r} was lost"
            return type(error)(f"{what} before the prefill request came: {error}")
        return None

    async def meet(self, address: str) -> KvPair:
        """The peer at an address, connected and greeted.

        Raises ConnectFailed, PeerRestarted and other EngineErrors of the connection, or
        DeadlineExceeded where no KV endpoint answers there.
        """
        give_up = self._clock.monotonic() + self.connect_timeout
        peer = await self._engine.connect(address, timeout=self.connect_timeout)
        if not peer.alive:
            raise peer.error or PeerLost(f"the engine at {address} was lost while connecting to it")
        pair = self.of(peer)
        try:
            # Not wait_for(): before Python 3.12 it forgets that it was cancelled where the HELLO
            # comes at that moment.
            async with asyncio.timeout(give_up - self._clock.monotonic()):
                await pair.greeted()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine at {address} did not introduce a KV cache within "
                f"{self.connect_timeout:g} s; does a KvEndpoint run there?"
            ) from None
        if pair.error is not None:
            raise pair.error
        return pair

    async def meet_sources(
        self, ticket: Ticket, addresses: str | Sequence[str]
    ) -> tuple[KvPair, ...]:
        """The ranks of a ticket's prefill worker that write to this cache, in order of their rank.

        `addresses` are those of all its ranks, in order; of one it may be that alone. Raises
        as meet() does, TicketInvalid where another worker is there, LayoutMismatch, and
        InvalidArgument where an address is missing or is not that of the rank.
        """
        layout = self._cache.layout
        addresses = [addresses] if isinstance(addresses, str) else addresses
        # Any rank can say which ones they are: ask one that is likely to be among them.
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
                f"{first.hello.instance_id!r} with its {theirs.num_ranks} ranks, of which "
                f"{', '.join(map(str, ranks))} write to rank {layout.rank} here; pass the address "
                "of each of its ranks, in their order"
            )
        pairs = await asyncio.gather(
            *(self._meet_prefill(ticket, addresses[rank]) for rank in ranks)
        )
        for rank, pair in zip(ranks, pairs, strict=True):
            if pair.error is not None:
                raise pair.error  # lost while the others were met
            if pair.hello.layout != theirs.of_rank(rank):
                raise InvalidArgument(
                    f"the engine at {addresses[rank]} is rank {pair.hello.layout.rank} of "
                    f"{pair.hello.instance_id!r} and not rank {rank}; pass the addresses in the "
                    "order of the ranks, which have layouts that differ in nothing else"
                )
        return tuple(pairs)

    async def _meet_prefill(self, ticket: Ticket, address: str) -> KvPair:
        pair = await self.meet(address)
        require_peer(ticket, Role.PREFILL, pair.hello, f"at {address} is")
        return pair

    def _greet(self, pair: KvPair) -> None:
        # A peer that is lost by now is reported through peer_lost().
        with contextlib.suppress(EngineError):
            pair.send(hello_from(self._cache, self._identity, checksums=self._checksums))


_REGISTRATION_SECONDS: Final = 60.0


async def follow_first_rank(
    pairs: Pairs, identity: Identity, address: str, set_epoch: Callable[[int], None]
) -> Peer:
    """Takes the epoch of the first rank, whose engine is at `address`, and each later one while the
    connection lasts. Returns when it has one.

    Raises as Pairs.meet(), InvalidArgument where another instance is there, and DeadlineExceeded
    where the first rank is not registered within a minute.
    """
    pair = await pairs.meet(address)
    if pair.hello.instance_id != identity.instance_id:
        raise InvalidArgument(
            f"the engine at {address} is of instance {pair.hello.instance_id!r}, not of "
            f"{identity.instance_id!r}; pass the address of this instance's first rank"
        )
    known = asyncio.Event()

    def take(hello: Hello) -> None:
        if hello.epoch:
            known.set()
        if hello.epoch > identity.epoch:
            set_epoch(hello.epoch)

    pair.on_hello = take
    take(pair.hello)
    pair.peer.on_lost(lambda _: known.set())
    try:
        async with asyncio.timeout(_REGISTRATION_SECONDS):
            await known.wait()
    except TimeoutError:
        raise DeadlineExceeded(
            f"the first rank of {identity.instance_id!r}, at {address}, was not registered within "
            f"{_REGISTRATION_SECONDS:g} s"
        ) from None
    if pair.peer.error is not None:
        raise pair.peer.error
    return pair.peer
