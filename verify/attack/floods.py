"""Floods: many connections, half handshakes, slow senders, peers that do not read."""

from __future__ import annotations

import contextlib
import random
import resource
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

from . import wire
from .attack import Attack, Flood, Repeated, Tally, Tried
from .hostile import Handshake, Member, TcpWriter, closed, read
from .pair import Pair
from .worker import KEY

_CONNECTIONS_PER_SECOND: Final = 1000
_MOST_OPEN: Final = 900  # sockets of the attacker, which may have 1,024 descriptors
_WRONG_KEY: Final = ("handshake", ("authentication-failed",))
_LATE: Final = ("handshake", ("deadline-exceeded", "backpressure", "peer-lost"))


class _Sockets:
    """The attacker's open connections. It counts those that the victim closes."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.open: list[socket.socket] = []

    def add(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.open.append(sock)
        self._tally.attempts += 1

    def collect(self) -> None:
        """Removes connections that the victim has closed."""
        poll = select.poll()
        for each in self.open:
            poll.register(each, select.POLLIN)
        ready = {number for number, _ in poll.poll(0)}
        for each in [one for one in self.open if one.fileno() in ready]:
            gone = False
            with contextlib.suppress(BlockingIOError):
                try:
                    gone = each.recv(65536) == b""
                except ConnectionError:
                    gone = True
            if gone:
                self.open.remove(each)
                each.close()
                self._tally.refused += 1

    def close(self, seconds: float = 5.0) -> None:
        """Waits up to `seconds` for the victim to close each connection."""
        for each in self.open:
            self._tally.refused += closed(each, seconds)
            each.close()
        self.open.clear()


@contextlib.contextmanager
def _repeated(
    step: Callable[[_Sockets, int], None], per_second: float = _CONNECTIONS_PER_SECOND
) -> Iterator[Tally]:
    tally = Tally()
    sockets = _Sockets(tally)
    count = 0

    def one() -> None:
        nonlocal count
        with contextlib.suppress(BlockingIOError, ConnectionError):
            step(sockets, count)
        count += 1
        if count % 50 == 0:
            sockets.collect()

    thread = Repeated(one, per_second)
    thread.start()
    try:
        yield tally
    finally:
        thread.stop()
        sockets.close()


def strangers(pair: Pair, rng: random.Random) -> contextlib.AbstractContextManager[Tally]:
    """Opens connections that send a wrong hello and wait."""
    target = pair.decode.target
    hello = rng.randbytes(wire.HELLO_BYTES)

    def step(sockets: _Sockets, _: int) -> None:
        if len(sockets.open) < _MOST_OPEN:
            sock = target.connect()
            sockets.add(sock)
            sock.send(hello)

    return _repeated(step)


@contextlib.contextmanager
def strangers_elsewhere() -> Iterator[None]:
    """Opens as many connections to a listener of the attacker."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:

        def step() -> None:
            sock = socket.create_connection(listener.getsockname())
            sock.send(bytes(wire.HELLO_BYTES))
            other, _ = listener.accept()
            other.close()
            sock.close()

        thread = Repeated(step, _CONNECTIONS_PER_SECOND)
        thread.start()
        yield
        thread.stop()


def half_handshakes(pair: Pair, _: random.Random) -> contextlib.AbstractContextManager[Tally]:
    """Opens connections that send nothing, half a hello, or a hello without a proof, and stay
    open."""
    target = pair.decode.target
    hello = wire.hello(bytes(16), target.engine)
    openings = (b"", hello[:40], hello)

    def step(sockets: _Sockets, count: int) -> None:
        if len(sockets.open) < _MOST_OPEN:
            sock = target.connect()
            sockets.add(sock)
            sock.send(openings[count % 3])

    return _repeated(step)


def slow_strangers(pair: Pair, _: random.Random) -> contextlib.AbstractContextManager[Tally]:
    """Opens two hundred connections that each send their hello one byte at a time."""
    target = pair.decode.target
    hello = wire.hello(bytes(16), target.engine) + bytes(1 << 16)
    sent: dict[socket.socket, int] = {}

    def step(sockets: _Sockets, _: int) -> None:
        for each in sockets.open:
            with contextlib.suppress(ConnectionError, BlockingIOError):
                at = sent.get(each, 0)
                each.send(hello[at : at + 1])
                sent[each] = at + 1
        if len(sockets.open) < 200:
            sockets.add(target.connect())

    return _repeated(step, 50)


def silent_rendezvous(pair: Pair, _: random.Random) -> contextlib.AbstractContextManager[Tally]:
    """Opens silent connections to the unix socket of the local fabric."""
    target = pair.decode.target

    def step(sockets: _Sockets, _: int) -> None:
        if len(sockets.open) < _MOST_OPEN:
            sockets.add(target.connect_local())

    return _repeated(step)


@contextlib.contextmanager
def refused_writes(pair: Pair, rng: random.Random) -> Iterator[Tally]:
    """Sends refused batches as a key holder, as fast as they are answered."""
    tally = Tally()
    with Member(pair.decode.target, KEY) as member:
        writer = TcpWriter(member)

        def step() -> None:
            tally.attempts += 1
            tally.refused += writer.write(rng.getrandbits(64), [(0, 64)], None) == "unknown-region"

        thread = Repeated(step, 2000)
        thread.start()
        try:
            yield tally
        finally:
            thread.stop()
            writer.close()


def never_reading(pair: Pair, _: random.Random) -> Tried:
    """Sends refused batches as a key holder, and never reads the answers."""
    with Member(pair.decode.target, KEY) as member:
        writer = TcpWriter(member)
        batches = wire.writes_frame(1, [(0, 0)], None) * 4096
        sent = 0
        writer.lane.settimeout(5)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < 256 << 20:
                member.control.sendall(wire.control_frame(wire.HEARTBEAT))
                writer.lane.sendall(batches)
                sent += len(batches)
        return Tried(1, int(sent < 256 << 20))


def empty_messages(pair: Pair, _: random.Random) -> Tried:
    """Sends empty messages as a key holder while the victim's loop is busy. The first one that the
    victim reads ends the connection."""
    with Member(pair.decode.target, KEY) as member:
        writer = TcpWriter(member)
        writer.write(0, [(0, 8)], None)
        frames = wire.control_frame(wire.MESSAGE) * 8192
        sent = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < 64 << 20:
                member.control.sendall(frames)
                sent += len(frames)
        return Tried(1, int(closed(member.control)))


def long_frames(pair: Pair, _: random.Random) -> Tried:
    """Sends control frames that announce far more bytes than a message may have."""
    sizes = (1 << 20 | 1, 1 << 24, 1 << 31, (1 << 32) - 1)
    refused = 0
    for size in sizes:
        with Member(pair.decode.target, KEY) as member:
            member.control.sendall(wire.control_frame(wire.MESSAGE, b"x", size=size))
            refused += closed(member.control)
    return Tried(len(sizes), refused)


def never_ready(pair: Pair, _: random.Random) -> Tried:
    """Connects many key holders that authenticate, open no path, and stay: the victim closes the
    oldest ones. An attacker with more processes would only have more such connections."""
    members: list[socket.socket] = []
    limit, extra = 1024, 64
    raised = _raise_descriptors(limit + extra + 64)
    assert raised, "the attacker needs more descriptors"
    for _index in range(limit + extra):
        handshake = Handshake(pair.decode.target, KEY)
        assert handshake.run() is not None
        members.append(handshake.sock)
        if _index % 128 == 0:
            for each in members:
                with contextlib.suppress(ConnectionError):
                    each.send(wire.control_frame(wire.HEARTBEAT))
    refused = sum(closed(each) for each in members[:extra])
    open_still = sum(not closed(each, 0.0) for each in members[extra:])
    for each in members:
        each.close()
    return Tried(extra, refused if open_still else 0)


def _raise_descriptors(number: int) -> bool:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    return number <= hard


@contextlib.contextmanager
def slow_members(pair: Pair, _: random.Random) -> Iterator[Tally]:
    """Sends a long batch and a long message from each of 20 key holders, one byte at a time."""
    tally = Tally()
    grant = pair.decode.ask("grant", peer=None)
    with contextlib.ExitStack() as stack:
        socks = []
        for _index in range(20):
            member = stack.enter_context(Member(pair.decode.target, KEY))
            writer = TcpWriter(member)
            stack.callback(writer.close)
            writer.lane.sendall(wire.writes_frame(7, [(0, 1 << 20)], grant["imm"]))
            member.control.sendall(struct.pack("<IB3x", 1 << 20, wire.MESSAGE))
            socks += [member.control, writer.lane]
            tally.attempts += 1

        sent = 0

        def step() -> None:
            nonlocal sent
            for each in socks:
                each.send(b"\xee")
            sent += 1

        thread = Repeated(step, 20)
        thread.start()
        try:
            yield tally
        finally:
            thread.stop()
            # Complete every batch at once, to see that it is refused.
            for lane in socks[1::2]:
                lane.sendall(bytes((1 << 20) - sent))
                tally.refused += wire.ack_status(read(lane, wire.ACK_BYTES)) == "unknown-region"
    pair.decode.ask("release", counter=grant["counter"])


ATTACKS: Final[tuple[Any, ...]] = (
    Flood(
        "flood of connections",
        "decode",
        ("handshake", ("protocol-error",)),
        strangers,
        strangers_elsewhere,
    ),
    Flood("flood of half handshakes, kept open", "decode", _LATE, half_handshakes),
    Flood("hellos of one byte at a time", "decode", _LATE, slow_strangers),
    Flood("flood of the local socket", "decode", _LATE, silent_rendezvous, fabrics=("local",)),
    Flood(
        "key holder: flood of refused writes",
        "decode",
        ("write", ("unknown-region",)),
        refused_writes,
        fabrics=("tcp",),
    ),
    Flood(
        "key holder: batches of one byte at a time",
        "decode",
        ("write", ("unknown-region",)),
        slow_members,
        fabrics=("tcp",),
    ),
    Attack(
        "key holder: frames of huge length", "decode", ("peer", ("protocol-error",)), long_frames
    ),
    Attack(
        "key holder: does not read acknowledgements",
        "decode",
        ("peer", ("backpressure",)),
        never_reading,
        fabrics=("tcp",),
    ),
    Attack(
        "key holder: flood of empty messages",
        "decode",
        ("message", ("protocol-error",)),
        empty_messages,
        fabrics=("tcp",),
    ),
    Attack(
        "key holder: peers that never get ready", "decode", ("peer", ("backpressure",)), never_ready
    ),
)
