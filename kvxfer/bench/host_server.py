"""The receiving host of `kvxfer bench --serve`: one client after the other.

A client's requests are messages to the server's engine, which only engines that know the cluster
key can send. Its writes come from further engines of the client, one for each fabric.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import socket
from collections.abc import Callable, Iterator
from typing import Final, assert_never

import msgspec
import numpy as np

from kvxfer import _probes
from kvxfer.bench import messages as m
from kvxfer.bench.destination import Destination
from kvxfer.bench.machine import End, this_end
from kvxfer.bench.pages import PageLists
from kvxfer.bench.probe_end import ProbeEnd
from kvxfer.bench.receiver import answer_or_failure, respond
from kvxfer.bench.settings import PEER_TIMEOUT_SECONDS
from kvxfer.engine import Counter, Engine, Peer
from kvxfer.engine.callback import logger
from kvxfer.errors import (
    Backpressure,
    BenchError,
    EngineClosed,
    EngineError,
    KvxferError,
    PeerError,
)

# The longest silence of a client, longer than it waits for an operator.
_IDLE_SECONDS: Final = 300.0
_ECHO_SECONDS: Final = 10.0
_LEAVE_SECONDS: Final = 2.0
_REQUEST = msgspec.msgpack.Decoder[m.HostRequest](m.HostRequest)


class _NoticeHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def engine_notices() -> Iterator[list[str]]:
    """Collects the notices of this process's engines, such as "NIC mlx5_0 is down"."""
    handler = _NoticeHandler()
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


async def serve_hosts(
    cluster_key: bytes,
    host: str,
    port: int,
    *,
    gpu: int | None,
    once: bool,
    announce: Callable[[int], None],
    tell: Callable[[str], None],
) -> None:
    """Serves clients until it is cancelled, or with `once` until the first has gone, whose failure
    it raises. They write into memory of `gpu`, or of the host. Calls `announce` with the port once
    it listens, and `tell` with a line for each client that comes, and for its end."""
    engine = Engine(
        cluster_key=cluster_key,
        name=f"bench on {socket.gethostname()}"[:128],
        host=host,
        port=port,
        peer_timeout=PEER_TIMEOUT_SECONDS,
    )
    async with engine:
        if gpu is not None:
            engine.alloc(1, gpu=gpu).close()  # fails now, and not with the first client
        clients = _Clients()
        engine.handler = clients
        announce(int(engine.address.rpartition("/")[0].rpartition(":")[2]))
        while True:
            client = await clients.arrived.get()
            try:
                await _serve_client(engine, client, host, gpu, tell)
            except KvxferError as error:
                if once:
                    raise
                tell(f"{client.peer.name} was not served to the end: {error}")
            finally:
                clients.forget(client)
            if once:
                return


class _Client:
    """The client that is served."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.requests: asyncio.Queue[bytes] = asyncio.Queue()
        self.has_last_answer = False

    @property
    def leaves(self) -> bool:
        """True if the next client may come. It is served once this one's memory is taken back."""
        return self.has_last_answer or self.peer.error is not None


class _Clients:
    """The engine's handler: admits one client at a time."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[_Client] = asyncio.Queue()
        self.current: _Client | None = None

    def peer_up(self, peer: Peer) -> None:
        pass  # a peer is a client once it asks for something

    def message(self, peer: Peer, data: bytes) -> None:
        if self.current is None or (self.current.leaves and self.current.peer is not peer):
            self.current = _Client(peer)
            self.arrived.put_nowait(self.current)
        if self.current.peer is peer:
            self.current.requests.put_nowait(data)
        else:
            _answer(
                peer,
                m.Failed(
                    BenchError.code,
                    f"the server is measuring with {self.current.peer.name}; start again when "
                    "that has ended",
                ),
            )

    def peer_lost(self, peer: Peer, error: EngineError) -> None:
        pass  # _serve_client() notices it

    def forget(self, client: _Client) -> None:
        if self.current is client:
            self.current = None


def _answer(peer: Peer, answer: m.Answer) -> None:
    with contextlib.suppress(PeerError, EngineClosed, Backpressure):
        peer.send(msgspec.msgpack.encode(answer))


async def _serve_client(
    engine: Engine, client: _Client, host: str, gpu: int | None, tell: Callable[[str], None]
) -> None:
    """Serves a client until it leaves. Raises BenchError if it is lost, is silent or is refused."""
    peer = client.peer
    tell(f"{peer.name} has come")
    with engine_notices() as notices:
        session = _Session(engine, host, gpu, notices)
        serving = asyncio.create_task(_serve_requests(session, client))
        lost = asyncio.Event()
        peer.on_lost(lambda _: lost.set())
        losing = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait((serving, losing), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise BenchError(f"it was lost: {peer.error}")
            # The client goes when it has the last answer.
            await asyncio.wait((losing,), timeout=_LEAVE_SECONDS)
            await serving
        finally:
            for task in (serving, losing):
                task.cancel()
            await asyncio.wait((serving, losing))
            await session.close()
            peer.close()
    tell(f"{peer.name} has its figures")


async def _serve_requests(session: _Session, client: _Client) -> None:
    while True:
        try:
            async with asyncio.timeout(_IDLE_SECONDS):
                data = await client.requests.get()
        except TimeoutError:
            raise BenchError(f"it asked nothing for {_IDLE_SECONDS:g} s") from None
        try:
            request = _REQUEST.decode(data)
        except msgspec.MsgspecError as error:
            text = f"a server of this version does not know this request: {error}"
            client.has_last_answer = True
            _answer(client.peer, m.Failed(BenchError.code, text))
            raise BenchError(text) from error
        answer = await answer_or_failure(request, session.respond(request))
        refusal = answer if isinstance(request, m.Greet) and isinstance(answer, m.Failed) else None
        client.has_last_answer = refusal is not None or isinstance(request, m.Leave)
        _answer(client.peer, answer)
        if refusal is not None:
            raise BenchError(refusal.message)
        if client.has_last_answer:
            return


class _Session:
    """The resources of this host that one client has."""

    def __init__(self, engine: Engine, host: str, gpu: int | None, notices: list[str]) -> None:
        self._engine, self._host, self._gpu, self._notices = engine, host, gpu, notices
        self._end: End = this_end(engine, gpu)
        self._destination: Destination | None = None
        self._probes: ProbeEnd | None = None
        self._echo: asyncio.Task[None] | None = None

    async def respond(self, request: m.HostRequest) -> m.Answer:
        """Does what is asked. Raises KvxferError or OSError if it fails."""
        match request:
            case m.Greet(end):
                if end.version != self._end.version:
                    raise BenchError(
                        f"{end.host} has kvxfer {end.version}, and the server {self._end.host} has "
                        f"{self._end.version}; install the same version on both"
                    )
                return m.Welcome(self._end)
            case m.OpenPool(pool_bytes):
                await self.close()
                self._destination = destination = _new_destination(pool_bytes, self._gpu)
                mailbox = mmap.mmap(-1, _probes.MAILBOX_BYTES)
                self._probes = ProbeEnd(destination.pool, mailbox, self._host)
                return m.PoolOpened(destination.use_engine(self._engine))
            case m.StartEcho(engine_id, imm, count):
                return m.Counters([self._start_echo(engine_id, imm, count)])
            case m.EndEcho(nbytes):
                await self._end_echo(nbytes)
            case m.ReadNotices():
                return m.Notices(list(self._notices))
            case m.Leave():
                pass
            case m.NewCounters() | m.CheckWrites() | m.TcpListen() | m.TcpAccept() | m.TcpReceive():
                destination, probes = self._pool()
                return await respond(request, destination, probes)
            case unknown:
                assert_never(unknown)
        return m.Done()

    async def close(self) -> None:
        """Takes the pool back: nothing lands in it afterwards."""
        if self._echo is not None:
            self._echo.cancel()
            await asyncio.wait((self._echo,))
            self._echo = None
        if self._destination is not None:
            await self._destination.close_engine()
            self._destination = None
        if self._probes is not None:
            self._probes.close()
            self._probes = None

    def _pool(self) -> tuple[Destination, ProbeEnd]:
        if self._destination is None or self._probes is None:
            raise BenchError("no pool is open")
        return self._destination, self._probes

    def _start_echo(self, engine_id: str, imm: int, count: int) -> int:
        peer = next((each for each in self._engine.peers if each.engine_id == engine_id), None)
        if peer is None:
            raise BenchError(f"no engine {engine_id} is connected")
        counter = self._engine.counter()
        self._echo = asyncio.create_task(_echo(peer, counter, imm, count))
        return counter.imm

    async def _end_echo(self, nbytes: int) -> None:
        if self._echo is None:
            raise BenchError("no writes are being answered")
        await self._echo
        self._echo = None
        destination, _ = self._pool()
        first = np.zeros(1, np.int64)
        destination.check([PageLists(nbytes, first, first)])


async def _echo(peer: Peer, counter: Counter, imm: int, count: int) -> None:
    """Answers each write that arrives. Raises an error if one is missing, or one too many comes."""
    try:
        for number in range(1, count + 1):
            await counter.wait_at_least(number, timeout=_ECHO_SECONDS)
            answer = peer.write_imm(imm)
        await answer
        await counter.wait(count, timeout=_ECHO_SECONDS)
    finally:
        counter.release()


def _new_destination(pool_bytes: int, gpu: int | None) -> Destination:
    """Makes a pool. Raises BenchError if this host has no memory for it."""
    try:
        return Destination(pool_bytes, gpu)
    except (OSError, OverflowError, ValueError) as error:
        raise BenchError(
            f"there is no memory for a pool of {pool_bytes >> 20} MiB on {socket.gethostname()}: "
            f"{error}; use a smaller --pool"
        ) from error
