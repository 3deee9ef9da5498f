"""The sending host of `kvxfer bench --to`: asks the server, writes, and measures."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import numpy as np

from kvxfer.addresses import host_and_port
from kvxfer.bench import messages as m
from kvxfer.bench.cases import SourceMemory
from kvxfer.bench.channel import PeerChannel
from kvxfer.bench.host_report import (
    LINE_RATE,
    RAW_TCP,
    FabricFigures,
    HostReport,
    Pull,
    RoundTrip,
    Way,
    host_report,
    host_throughput,
    round_trip,
)
from kvxfer.bench.host_server import engine_notices
from kvxfer.bench.limits import MESSAGE_BYTES, RawTcp
from kvxfer.bench.machine import End, this_end
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.pair import Pair, ReceiverEngine, connected_pair
from kvxfer.bench.settings import PEER_TIMEOUT_SECONDS, LatencySettings, Settings
from kvxfer.bench.throughput import Mover, in_turn
from kvxfer.engine import Engine
from kvxfer.engine.core import Nic
from kvxfer.errors import (
    AuthenticationFailed,
    BenchError,
    ConnectFailed,
    FabricUnavailable,
    InvalidArgument,
    NotAvailableHere,
    PeerError,
    PermissionDenied,
)

FABRICS: Final = ("verbs", "ofi", "tcp")
PULL_SECONDS: Final = 60.0
# Any engine that listens there; it proves that it knows the cluster key.
_ANY_ENGINE: Final = "0" * 32
_CONNECT_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 10.0
# The time that requests run between two checks while a NIC may be pulled.
_STRETCH_NS: Final = 1_000_000_000
# The end of the engine's notice that a NIC is down.
_DOWN: Final = " is down"


@dataclass(frozen=True, slots=True)
class Server:
    """The address where `kvxfer bench --serve` listens; `host` is numeric."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int) -> Server:
        """Parses HOST, HOST:PORT or [HOST]:PORT. Raises InvalidArgument or ConnectFailed."""
        v6 = text.count(":") > 1 and not text.startswith("[")
        try:
            split = urlsplit(f"//[{text}]" if v6 else f"//{text}")
            host, port = split.hostname, split.port or default_port
        except ValueError:
            host, port = None, 0
        if host is None:
            raise InvalidArgument(f"--to is {text!r}; write it as HOST or HOST:PORT")
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectFailed(
                f"--to {text}: this host does not know the host {host} ({error.strerror}); "
                "use its address"
            ) from error
        return cls(str(found[0][4][0]), port)

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)

    def engine_address(self, engine_id: str) -> str:
        return f"kvx://{self}/{engine_id}"


def named_fabrics(names: list[str]) -> tuple[str, ...]:
    """Returns each name once. Raises InvalidArgument for a fabric not measured between hosts."""
    if not names or not set(names) <= set(FABRICS):
        raise InvalidArgument(
            f"--fabrics is {','.join(names)!r}; with --to choose from {', '.join(FABRICS)}"
        )
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Ask:
    """The callbacks of a run, for the person that started it."""

    progress: Callable[[str], None]
    """A callback that gets what was just measured."""
    pull: Callable[[str], None] | None
    """A callback that asks for a NIC to be pulled; None measures no pull."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The values that all measurements of one run need."""

    server: Server
    cluster_key: bytes
    settings: Settings
    ask: Ask
    channel: PeerChannel
    engine_id: str
    receiver: End
    gpu: int | None


async def measure_host(
    server: Server,
    cluster_key: bytes,
    settings: Settings,
    fabrics: tuple[str, ...] | None,
    gpu: int | None,
    ask: Ask,
) -> HostReport:
    """Measures writes from memory of `gpu`, or of this host, to the server, over `fabrics`; None
    takes all that both ends have but local.

    Raises ConnectFailed, AuthenticationFailed, FabricUnavailable, BenchError, or WrongBytes as soon
    as one byte is wrong.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    control = Engine(
        cluster_key=cluster_key,
        name=f"bench on {socket.gethostname()}"[:128],
        peer_timeout=PEER_TIMEOUT_SECONDS,
    )
    async with control:
        here = this_end(control, gpu)
        channel, engine_id = await _connect(control, server)
        there = await _greet(channel, here, server)
        run = _Run(server, cluster_key, settings, ask, channel, engine_id, there, gpu)
        figures = [
            await _measure_fabric(run, fabric, named=fabrics is not None)
            for fabric in _common(fabrics, here, there)
        ]
        if all(each.skipped is not None for each in figures):
            raise BenchError(
                "nothing could be measured: "
                + "; ".join(f"{each.fabric}: {each.skipped}" for each in figures)
            )
        await channel.call(m.Leave(), m.Done)
    return host_report(started_at, str(server), (here, there), settings, figures)


async def _connect(control: Engine, server: Server) -> tuple[PeerChannel, str]:
    try:
        peer = await control.connect(server.engine_address(_ANY_ENGINE), _CONNECT_SECONDS)
    except AuthenticationFailed as error:
        raise AuthenticationFailed(
            f"the server at {server} has another cluster key; give both hosts the same, by "
            "--cluster-key-file or KVXFER_CLUSTER_KEY"
        ) from error
    except PeerError as error:
        raise ConnectFailed(
            f"no server at {server}: {error}; start `kvxfer bench --serve --host {server.host}` "
            "there, and let its firewall pass TCP"
        ) from error
    return PeerChannel(peer, str(server)), peer.engine_id


async def _greet(channel: PeerChannel, here: End, server: Server) -> End:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return (await channel.call(m.Greet(here), m.Welcome)).end
    except TimeoutError:
        raise BenchError(
            f"the engine at {server} has the cluster key and does not answer: it is not "
            "`kvxfer bench --serve`; start one there, on another port"
        ) from None


def _common(named: tuple[str, ...] | None, here: End, there: End) -> tuple[str, ...]:
    """Returns the fabrics to measure. Raises FabricUnavailable if an end lacks a named one."""
    if named is None:
        return tuple(each for each in FABRICS if each in here.fabrics and each in there.fabrics)
    for fabric in named:
        for end in (here, there):
            if fabric not in end.fabrics:
                raise FabricUnavailable(
                    f"{end.host} has {', '.join(end.fabrics)} and not {fabric}; `kvxfer doctor` "
                    "says there what is missing"
                )
    return named


async def _measure_fabric(run: _Run, fabric: str, *, named: bool) -> FabricFigures:
    """Measures a fabric. One that was not named may be missing between the two hosts."""
    opened = await run.channel.call(m.OpenPool(run.settings.pool_bytes), m.PoolOpened)
    receiver = ReceiverEngine(
        run.server.engine_address(run.engine_id), opened.descriptor, (fabric,), run.cluster_key
    )
    memory, pool_bytes = SourceMemory.ALLOCATED, run.settings.pool_bytes
    try:
        async with connected_pair(run.channel, receiver, memory, pool_bytes, run.gpu) as pair:
            # Both ends touch all of their pools once before anything is timed.
            await pair.transfer(run.settings.sweep(max(run.settings.page_bytes)))
            pinned = range(len(pair.engine.nics)) if len(pair.engine.nics) > 1 else ()
            ways = [await _measure_way(run, pair, fabric, nic) for nic in (None, *pinned)]
            pull = None
            if run.ask.pull is not None:
                pull = await _measure_pull(run, pair, fabric, run.ask.pull)
    except ConnectFailed as error:
        text = (
            f"the server at {run.server} takes no connection over {fabric}: {error}; see what it "
            "printed, and whether its firewall passes all ports from this host"
        )
        if named:
            raise ConnectFailed(text) from error
        return FabricFigures(fabric, skipped=text)
    # A NIC of either end does not reach the memory of a GPU.
    except (NotAvailableHere, FabricUnavailable, PermissionDenied) as error:
        if named:
            raise
        return FabricFigures(fabric, skipped=str(error))
    return FabricFigures(fabric, None, ways, pull)


async def _measure_way(run: _Run, pair: Pair, fabric: str, nic: int | None) -> Way:
    name = None if nic is None else pair.engine.nics[nic].name
    over = f"{fabric} over {name}" if name else fabric
    theirs = {each.network for each in run.receiver.nics}
    if nic is not None and pair.engine.nics[nic].network not in theirs:
        network = pair.engine.nics[nic].network
        return Way(name, "", None, f"{run.receiver.host} has no NIC of its network, {network}")
    tcp, without_limit = await _raw_tcp(run) if fabric == "tcp" else (None, None)
    line = line_rate(pair.engine.nics, run.receiver.nics, nic)
    movers: list[Mover] = [partial(pair.transfer, nic=nic)]
    if tcp is not None:
        movers.append(partial(_send_raw, tcp))
    elif fabric != "tcp" and line is None:
        without_limit = "a NIC does not say how fast it is"
    throughput = []
    try:
        for size in run.settings.page_bytes:
            draw = run.settings.draw(size)
            measured = partial(run.ask.progress, f"{over}: pages of {size >> 10} KiB")
            engine_ns, *limit = await in_turn(movers, draw, run.settings.rounds, measured)
            throughput.append(host_throughput(draw, engine_ns, limit[0] if limit else [], line))
    finally:
        if tcp is not None:
            tcp.close()
    round_trips = []
    for each in run.settings.latency:
        round_trips.append(await _round_trips(run, pair, each, nic))
        run.ask.progress(f"{over}: round trips")
    limit_name = RAW_TCP if tcp is not None else LINE_RATE if line is not None else ""
    return Way(name, limit_name, without_limit, None, throughput, round_trips)


def line_rate(ours: list[Nic], theirs: list[Nic], pinned: int | None) -> int | None:
    """Returns the bits per second that the slower end's NICs allow: all of them, or the one of ours
    that a write is pinned to and the fastest that it may reach. None if unknown."""
    used = ours if pinned is None else [ours[pinned]]
    networks = {nic.network for nic in used}
    reached = [nic.bits_per_second for nic in theirs if nic.network in networks]
    if not reached:
        return None
    other = sum(reached) if pinned is None else max(reached)
    return min(sum(nic.bits_per_second for nic in used), other) or None


async def _raw_tcp(run: _Run) -> tuple[RawTcp | None, str | None]:
    """Returns a raw connection, or why there is none."""
    try:
        return await RawTcp.open(run.channel, run.server.host), None
    except (OSError, BenchError) as error:
        return None, (
            f"a raw TCP connection to another port of {run.server.host} failed ({error}); let its "
            "firewall pass all ports from this host"
        )


async def _send_raw(tcp: RawTcp, draw: PageDraw) -> list[int]:
    return await tcp.send(draw.request_bytes, draw.requests)


async def _round_trips(
    run: _Run, pair: Pair, settings: LatencySettings, nic: int | None
) -> RoundTrip:
    rounds = []
    for _ in range(settings.rounds):
        counter = pair.engine.counter()
        start = m.StartEcho(pair.engine.engine_id, counter.imm, settings.writes)
        (imm,) = (await run.channel.call(start, m.Counters)).imms
        taken = []
        for number in range(1, settings.writes + 1):
            if settings.gap_ns:
                await asyncio.sleep(settings.gap_ns / 1e9)
            begin = time.monotonic_ns()
            written = pair.peer.write(
                pair.region, pair.receiver.descriptor, length=MESSAGE_BYTES, imm=imm, nic=nic
            )
            await counter.wait_at_least(number, timeout=_ANSWER_SECONDS)
            taken.append(time.monotonic_ns() - begin)
            await written
        await run.channel.call(m.EndEcho(MESSAGE_BYTES), m.Done)
        counter.release()
        rounds.append(taken)
    return round_trip(MESSAGE_BYTES, settings.gap_ns, rounds)


async def _measure_pull(run: _Run, pair: Pair, fabric: str, ask: Callable[[str], None]) -> Pull:
    """Runs requests until a NIC is down, and then for as many rounds as the settings say. The
    receiver checks their bytes, and that each of their writes was counted once."""
    if len(pair.engine.nics) < 2:
        here = ", ".join(nic.name for nic in pair.engine.nics) or "none"
        return Pull(skipped=f"it takes two NICs of {fabric} on this host, which has {here}")
    draw = run.settings.sweep(max(run.settings.page_bytes))
    before: list[int] = []
    with engine_notices() as notices:
        known = len(await _their_notices(run))

        async def down() -> bool:
            theirs = await _their_notices(run)
            return any(text.endswith(_DOWN) for text in (*notices, *theirs[known:]))

        ask(
            f"Pull the cable of one NIC of {fabric}, of either host, within {PULL_SECONDS:g} s: "
            + ", ".join(nic.name for nic in pair.engine.nics)
        )
        until = time.monotonic() + PULL_SECONDS
        for stretch in itertools.count():
            transfer = await pair.prepare(draw.of_round(stretch))
            taken = await transfer.run()
            while sum(taken) < _STRETCH_NS:
                taken += await transfer.run()
            in_flight = await down()
            await transfer.check()
            if in_flight or await down():
                break
            before += taken
            if time.monotonic() > until:
                return Pull(skipped=f"no NIC went down within {PULL_SECONDS:g} s")
        after = []
        for index in range(run.settings.rounds):
            after += await pair.transfer(draw.of_round(stretch + 1 + index))
        theirs = (await _their_notices(run))[known:]
    return Pull(
        sender_notices=list(dict.fromkeys(notices)),
        receiver_notices=list(dict.fromkeys(theirs)),
        in_flight=in_flight,
        before_gb_per_s=draw.request_bytes / float(np.median(before or taken)),
        after_gb_per_s=draw.request_bytes / float(np.median(after)),
        longest_ms=max(*taken, *after) / 1e6,
        verified_bytes=draw.request_bytes * draw.requests * (stretch + 1 + run.settings.rounds),
    )


async def _their_notices(run: _Run) -> list[str]:
    return (await run.channel.call(m.ReadNotices(), m.Notices)).texts
