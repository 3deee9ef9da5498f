"""The connections between all ranks, and the set-up of their memory for steps.

Rank i connects to all j < i, a newcomer to all. Both send Hello, then Terms (after they have handed
over their memory, on one host), then Welcome. All of it runs in calls of the group, which take
completions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Protocol

from kvxfer.clock import Clock
from kvxfer.engine.callback import logger
from kvxfer.engine.native import translated
from kvxfer.engine.peer import Peer
from kvxfer.engine.synchronous import SynchronousEngine
from kvxfer.errors import (
    AuthenticationFailed,
    EngineClosed,
    EngineError,
    InvalidArgument,
    KvxferError,
    PeerError,
    PeerLost,
    ProtocolError,
)
from kvxfer.moe.memory_socket import Handed, MemorySocket, give
from kvxfer.moe.messages import (
    VERSION,
    Hello,
    Join,
    Members,
    Message,
    Refused,
    Terms,
    Welcome,
    decode,
    encode,
)
from kvxfer.moe.placement import Placement
from kvxfer.moe.shape import MoeShape
from kvxfer.moe.view_messages import Answer, Ask, Excluded, Wait, Yield

if TYPE_CHECKING:
    from kvxfer._native import MoeExchange

CONNECT_SECONDS: Final = 2.0
_ASK_SECONDS: Final = 0.25
"""The time for a lost rank's engine to accept a connection, unless it is dead or frozen."""
_REDIAL_SECONDS: Final = 0.1


class MeshHandler(Protocol):
    """A handler of the events that concern views. It must not block."""

    def set_up(self, rank: int) -> None:
        """Handles a pair with both sides set up."""

    def heard(self, rank: int, message: Message) -> None:
        """Handles a message of a rank that has sent Hello."""

    def lost(self, rank: int, error: Exception) -> None:
        """Handles the loss of a rank that has sent Hello, after its connection has ended."""

    def asked(self, ask: Ask) -> None:
        """Handles the question of a rank that has lost this one; reply() answers."""

    def answered(self, rank: int, ask: Ask, answer: Answer | None) -> None:
        """Handles the answer to ask(); None if the rank is not reached, or is lost first."""

    def members_known(self, addresses: dict[int, str], *, taken: bool) -> None:
        """Handles the answer to ask_members(): no addresses while this rank is still a member.
        taken: the rank that answers has not lost that member."""

    def refused(self, rank: int | None, error: Exception) -> None:
        """Handles a refusal to form a pair, by that rank; None: by this one."""


@dataclass(slots=True)
class _Pair:
    """A pair of this rank and another one that has sent Hello."""

    peer: Peer
    hello: Hello
    ours: bool = False
    """Whether this side is set up."""
    theirs: bool = False


class Mesh:
    """The connections of one rank. `members` are those whose place no newcomer takes."""

    def __init__(
        self,
        engine: SynchronousEngine,
        exchange: MoeExchange,
        shape: MoeShape,
        placement: Placement,
        rank: int,
        handler: MeshHandler,
        clock: Clock,
    ) -> None:
        self.rank = rank
        self.addresses = {rank: engine.address}
        self.members: frozenset[int] = frozenset()
        self._handler = handler
        self._engine, self._exchange, self._clock = engine, exchange, clock
        self._shape, self._placement, self._of = shape, placement, len(placement.ranks)
        self._socket = MemorySocket()
        self._pairs: dict[int, _Pair] = {}
        self._ranks: dict[int, int] = {}  # ranks, keyed by the peer's id
        self._secrets: dict[int, bytes] = {}
        self._askers: dict[int, Peer] = {}
        self._asked: dict[int, tuple[int, Ask]] = {}  # keyed by the peer's id
        self._dialed: set[int] = set()
        self._redials: dict[int, float] = {}
        self._failed: dict[int, str] = {}  # the reason why a rank is dialed again
        self._refusal: KvxferError | None = None
        self._early: list[tuple[Peer, Hello]] = []  # waiting until a place is free
        engine.handler = self

    @property
    def near(self) -> set[int]:
        """The ranks on this host."""
        return {rank for rank, pair in self._pairs.items() if pair.peer.fabric == "local"}

    @property
    def set_up_with(self) -> frozenset[int]:
        return frozenset(
            rank
            for rank, pair in self._pairs.items()
            if pair.ours and pair.theirs and pair.peer.alive
        )

    @property
    def redials(self) -> bool:
        """Whether redial() has something to do soon."""
        return bool(self._redials)

    def missing(self, ranks: Iterable[int]) -> str:
        """Describes which of these ranks are not set up, and why."""
        late = sorted(frozenset(ranks) - self.set_up_with)
        absent = [rank for rank in late if rank not in self._pairs]
        silent = [rank for rank in late if rank in self._pairs]
        parts = [f"ranks {absent} have not connected"] if absent else []
        parts += [f"ranks {silent} have not answered"] if silent else []
        return "; ".join(parts + [f"rank {rank}: {why}" for rank, why in self._failed.items()])

    # --- connections

    def dial(self, addresses: Mapping[int, str]) -> None:
        """Connects to these ranks and sends Hello, with retries; stops those to other ranks."""
        self._redials = {rank: at for rank, at in self._redials.items() if rank in addresses}
        self.addresses |= addresses
        for rank in addresses:
            if rank not in self._dialed and rank not in self._redials:
                self._dial(rank)

    def redial(self) -> None:
        """Dials the ranks whose retry is due."""
        now = self._clock.monotonic()
        for rank in [rank for rank, at in self._redials.items() if at <= now]:
            del self._redials[rank]
            self._dial(rank)

    def _dial(self, rank: int) -> None:
        self._dialed.add(rank)

        def connected(peer: Peer | Exception) -> None:
            if isinstance(peer, Peer):
                self._greet(peer)
            elif isinstance(peer, AuthenticationFailed) or self._refusal is not None:
                self._handler.refused(rank, peer)
            else:
                self._dialed.discard(rank)
                self._failed[rank] = str(peer)
                self._redials[rank] = self._clock.monotonic() + _REDIAL_SECONDS

        self._engine.connect(self.addresses[rank], CONNECT_SECONDS, connected)

    def send(self, rank: int, message: Message) -> None:
        """Sends a message to a rank that has sent Hello; does nothing if it is lost."""
        pair = self._pairs.get(rank)
        if pair is not None:
            self._say(pair.peer, message)

    def ask(self, rank: int, ask: Ask) -> None:
        """Connects to a lost rank and asks it; answered() follows."""

        if rank not in self.addresses:  # a newcomer has never met this rank
            self._handler.answered(rank, ask, None)
            return

        def connected(peer: Peer | Exception) -> None:
            if isinstance(peer, Peer):
                self._asked[peer.id] = (rank, ask)
                self._say(peer, ask)
            else:
                self._handler.answered(rank, ask, None)

        self._engine.connect(self.addresses[rank], _ASK_SECONDS, connected)

    def reply(self, rank: int, answer: Answer) -> None:
        """Replies to a rank that asked."""
        asker = self._askers.pop(rank, None)
        if asker is not None:
            self._say(asker, answer)

    def ask_members(self, peer: Peer) -> None:
        """Asks a peer, and all ranks of pairs, for the members; members_known() follows."""
        for each in {peer, *(pair.peer for pair in self._pairs.values())}:
            self._say(each, Join(self.rank))

    def fence(self, rank: int) -> None:
        """Fences a rank: after this none of its writes lands, and it is lost."""
        pair = self._pairs.get(rank)
        if pair is not None:
            _fence(pair.peer)

    def admit(self, members: frozenset[int]) -> None:
        """Sets the members, and takes the Hello of newcomers that wait for a place."""
        self.members = members
        early, self._early = self._early, []
        for peer, hello in early:
            if peer.alive:
                self._receive(peer, hello)

    def refuse(self, error: KvxferError) -> None:
        """Tells all why there is no group, also those that send Hello from now on."""
        self._refusal = error
        for rank in self._pairs:
            self.send(rank, _refusal(error))

    def close(self) -> None:
        self._socket.close()

    # --- EngineHandler

    def peer_up(self, peer: Peer) -> None:
        pass  # the side that has connected speaks first

    def message(self, peer: Peer, data: bytes) -> None:
        try:
            message = decode(data, peer.name)
        except ProtocolError as error:
            self._cut_off(peer, error)
        else:
            self._receive(peer, message)

    def peer_lost(self, peer: Peer, error: EngineError) -> None:
        if (asked := self._asked.pop(peer.id, None)) is not None:
            self._handler.answered(*asked, None)
        self._secrets.pop(peer.id, None)
        rank = self._ranks.pop(peer.id, None)
        if rank is None:
            return
        pair = self._pairs.get(rank)
        if pair is None or pair.peer is peer:  # not a second process that claims this rank
            self._dialed.discard(rank)
            self._handler.lost(rank, error)

    def _receive(self, peer: Peer, message: Message) -> None:
        try:
            with translated():
                self._take(peer, message)
        except ProtocolError as error:
            self._cut_off(peer, error)
        except KvxferError as error:
            self._say(peer, _refusal(error))
            self._handler.refused(None, error)

    def _cut_off(self, peer: Peer, error: ProtocolError) -> None:
        logger.warning("rank %s: %s", self._ranks.get(peer.id, "?"), error)
        _fence(peer)

    def _take(self, peer: Peer, message: Message) -> None:
        rank = self._ranks.get(peer.id)
        match message:
            case Hello():
                self._hello(peer, message)
            case Join(place):
                if place in self.members:
                    self._say(peer, Members({}, taken=self._is_here(place)))
                else:
                    self._say(peer, Members(self._known()))
            case Members(addresses, taken):
                others = {each: at for each, at in addresses.items() if each < self._of}
                self._handler.members_known(others, taken=taken)
            case Ask():
                self._askers[message.rank] = peer
                self._handler.asked(message)
            case Excluded() | Yield() | Wait() if peer.id in self._asked:
                asked, ask = self._asked.pop(peer.id)
                self._handler.answered(asked, ask, message)
            case Refused():
                self._handler.refused(rank, message.error())
            case _ if rank is None or rank not in self._pairs:
                raise ProtocolError(f"{peer.name!r} has not said Hello")
            case _ if self._pairs[rank].peer is not peer:
                raise ProtocolError(f"{peer.name!r} is not rank {rank} any more")
            case Terms():
                self._terms(rank, peer, message)
            case Welcome():
                self._pairs[rank].theirs = True
                self._look(rank)
            case _:
                self._handler.heard(rank, message)

    # --- set-up of a pair

    def _is_here(self, member: int) -> bool:
        return member == self.rank or (member in self._pairs and self._pairs[member].peer.alive)

    def _known(self) -> dict[int, str]:
        return {rank: self.addresses[rank] for rank in self.members}

    def _greet(self, peer: Peer) -> None:
        secret = self._secrets[peer.id] = self._socket.expect()
        self._say(
            peer,
            Hello(
                self.rank,
                self._shape,
                self._placement,
                self._engine.address,
                self._socket.name,
                secret,
            ),
        )

    def _hello(self, peer: Peer, hello: Hello) -> None:
        if hello.rank in self.members:
            self._early.append((peer, hello))
            return
        if peer.id not in self._secrets:  # the peer has connected, and has no Hello yet
            self._greet(peer)
        self._ranks[peer.id] = hello.rank
        if self._refusal is not None:
            raise self._refusal
        self._require_same(hello)
        if hello.rank in self._pairs:  # a pair with a lost process
            self._exchange.remove(hello.rank)
        self._pairs[hello.rank] = _Pair(peer, hello)
        self.addresses[hello.rank] = hello.address
        if peer.fabric == "local":
            give(hello.socket, hello.secret, self._memory())
            self._say(peer, Terms(None))
        else:
            self._say(peer, Terms(self._exchange.open_remote(hello.rank, peer.id)))

    def _memory(self) -> Handed:
        exchange = self._exchange
        return Handed(exchange.memory_fd, exchange.doorbell_fd, exchange.memory_bytes)

    def _require_same(self, hello: Hello) -> None:
        """Raises InvalidArgument that names what differs."""
        if hello.version != VERSION:
            raise InvalidArgument(
                f"rank {hello.rank} speaks version {hello.version} and rank {self.rank} {VERSION}; "
                "install the same kvxfer at all ranks"
            )
        if hello.rank == self.rank or hello.rank >= self._of:
            raise InvalidArgument(f"rank {self.rank} meets a rank {hello.rank}")
        pair = self._pairs.get(hello.rank)
        if pair is not None and pair.peer.alive:
            raise InvalidArgument(f"two processes are rank {hello.rank}")
        for field in fields(MoeShape):
            ours, theirs = getattr(self._shape, field.name), getattr(hello.shape, field.name)
            if ours != theirs:
                raise InvalidArgument(
                    f"{field.name} is {ours!r} at rank {self.rank} and {theirs!r} at rank "
                    f"{hello.rank}; it has to be the same at all ranks"
                )
        if hello.placement != self._placement:
            raise InvalidArgument(
                f"ranks {self.rank} and {hello.rank} were given different placements"
            )

    def _terms(self, rank: int, peer: Peer, terms: Terms) -> None:
        try:
            if terms.remote is None:
                with self._socket.take(self._secrets.pop(peer.id)) as handed:
                    self._exchange.add_local(
                        rank, peer.id, handed.memory, handed.nbytes, handed.doorbell
                    )
            else:
                self._exchange.add_remote(rank, peer.id, terms.remote)
        except PeerLost as error:
            raise ProtocolError(str(error)) from error
        self._pairs[rank].ours = True
        self._say(peer, Welcome())
        self._look(rank)

    def _look(self, rank: int) -> None:
        if rank in self.set_up_with:
            self._handler.set_up(rank)

    def _say(self, peer: Peer, message: Message) -> None:
        with contextlib.suppress(PeerError, EngineClosed):  # the loss is reported elsewhere
            peer.send(encode(message))


def _fence(peer: Peer) -> None:
    with contextlib.suppress(PeerError, EngineClosed):  # lost already
        peer.fence()


def _refusal(error: Exception) -> Refused:
    code = error.code if isinstance(error, KvxferError) else KvxferError.code
    return Refused(code, str(error))
