"""Attacks without the cluster key: strangers, replays, and bytes altered in a handshake."""

from __future__ import annotations

import os
import random
import socket
from typing import Final

from . import wire
from .attack import Attack, Tried
from .hostile import Handshake, Member, Target, closed, flipped, read
from .local_writer import LocalWriter, receive, send
from .pair import Pair
from .worker import KEY

_MANY: Final = 40


def without_key(pair: Pair, rng: random.Random) -> Tried:
    tried = []
    for _ in range(_MANY):
        handshake = Handshake(pair.decode.target, rng.randbytes(32))
        tried.append((handshake.sock, handshake.run() is None))
    return _all_closed(tried)


def other_protocols(pair: Pair, rng: random.Random) -> Tried:
    openings = [
        b"GET / HTTP/1.1\r\nHost: kvxfer\r\nConnection: keep-alive\r\nAccept: */*\r\n\r\n",
        b"\x16\x03\x01\x02\x00" + bytes(200),  # TLS
        b"KVXF\xff\xff" + bytes(200),  # a version that does not exist
    ]
    tried = []
    for index in range(_MANY):
        sock = pair.decode.target.connect()
        opening = openings[index % 4] if index % 4 < 3 else rng.randbytes(100)
        sock.sendall(opening.ljust(wire.HELLO_BYTES, b" "))
        tried.append((sock, True))
    return _all_closed(tried)


def without_session(pair: Pair, rng: random.Random) -> Tried:
    """Opens tcp lanes, or a rendezvous by unix socket, that belong to no session."""
    refused = 0
    for _ in range(_MANY):
        hello = wire.Session(rng.randbytes(32)).lane_hello(0)
        if pair.fabric == "tcp":
            refused += _refuses_lane(pair.decode.target, hello)
        else:
            local = wire.Session(rng.randbytes(32)).lane_hello(wire.LOCAL_LANE)
            refused += _refuses_rendezvous(pair.decode.target, local)
    return Tried(_MANY, refused)


def replayed_handshake(pair: Pair, _: random.Random) -> Tried:
    """Replays every byte of an honest client."""
    handshake = Handshake(pair.decode.target, KEY)
    handshake.sock.sendall(handshake.hello())
    proof, _session = handshake.answer(read(handshake.sock, wire.REPLY_BYTES))
    handshake.sock.sendall(proof)
    assert read(handshake.sock, 2) == b"\0\0", "the honest handshake failed"
    recorded = handshake.hello() + proof + wire.control_frame(wire.PATHS, bytes(4))
    tried = []
    for index in range(_MANY):
        if index == _MANY // 2:
            handshake.sock.close()  # from here on the session is over
        sock = pair.decode.target.connect()
        sock.sendall(recorded)
        read(sock, wire.REPLY_BYTES)
        tried.append((sock, read(sock, 2) != b"\0\0"))
    return _all_closed(tried)


def replayed_lane(pair: Pair, _: random.Random) -> Tried:
    """Replays a lane or a rendezvous of an open session, and of an ended one."""
    refused = 0
    with Member(pair.decode.target, KEY) as member:
        if pair.fabric == "tcp":
            recorded = member.session.lane_hello(0)
            first = member.lane()
        else:
            recorded = member.session.lane_hello(wire.LOCAL_LANE)
            first = LocalWriter(member).socket
        for index in range(_MANY):
            if index == _MANY // 2:
                first.close()
                member.control.close()
            if pair.fabric == "tcp":
                refused += _refuses_lane(pair.decode.target, recorded)
            else:
                refused += _refuses_rendezvous(pair.decode.target, recorded)
    return Tried(_MANY, refused)


def altered_handshake(pair: Pair, rng: random.Random) -> Tried:
    """Changes one bit of an honest client's hello or proof on the way."""
    tried = []
    for index in range(_MANY):
        handshake = Handshake(pair.decode.target, KEY)
        hello = handshake.hello()
        handshake.sock.sendall(flipped(hello, rng) if index % 2 else hello)
        reply = read(handshake.sock, wire.REPLY_BYTES)
        if len(reply) == wire.REPLY_BYTES and reply[:2] == b"\0\0":
            proof, _session = handshake.answer(reply)
            if not index % 2:
                # Keeps the length: if it grew, the victim would wait for the rest until its
                # deadline.
                proof = proof[:4] + flipped(proof[4:], rng)
            handshake.sock.sendall(proof)
            tried.append((handshake.sock, read(handshake.sock, 2) != b"\0\0"))
        else:
            tried.append((handshake.sock, True))
    return _all_closed(tried)


def _all_closed(tried: list[tuple[socket.socket, bool]]) -> Tried:
    """Counts refused attempts whose connection the victim has closed or closes soon."""
    refused = sum(refused and closed(sock) for sock, refused in tried)
    for sock, _ in tried:
        sock.close()
    return Tried(len(tried), refused)


def _refuses_lane(target: Target, hello: bytes) -> bool:
    sock = target.connect()
    try:
        sock.sendall(hello)
        return read(sock, len(wire.LANE_ACCEPTED)) == b""
    finally:
        sock.close()


def _refuses_rendezvous(target: Target, hello: bytes) -> bool:
    unix: socket.socket = target.connect_local()
    ring, wake = os.memfd_create("ring"), os.eventfd(0)
    try:
        send(unix, hello, [ring, wake])
        return receive(unix) == (b"", [])
    finally:
        for each in (ring, wake):
            os.close(each)
        unix.close()


_WRONG_KEY: Final = ("handshake", ("authentication-failed",))
_ANY: Final = ("authentication-failed", "peer-restarted", "protocol-error")

ATTACKS: Final = (
    Attack("handshake without the key", "decode", _WRONG_KEY, without_key),
    Attack("other protocols on the port", "decode", ("handshake", _ANY[2:]), other_protocols),
    Attack("lane or rendezvous without a session", "decode", _WRONG_KEY, without_session),
    Attack("replayed handshake", "decode", _WRONG_KEY, replayed_handshake),
    Attack("replayed lane or rendezvous", "decode", _WRONG_KEY, replayed_lane),
    Attack("bits flipped in a handshake", "decode", ("handshake", _ANY), altered_handshake),
)
