"""An attacker on the path between two workers that flips bits of their traffic.

TCP traffic is not encrypted. This shows which changes are detected and which are not.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from . import wire
from .hostile import Target, flipped, read
from .pair import Pair, workers

Place: TypeAlias = Literal["header", "page"]
# Seconds; an altered header may cost the whole lease.
_LEASES: Final = {"header": 2.0, "page": 20.0}


@dataclass(frozen=True, slots=True)
class Altered:
    """The outcomes of transfers with one altered bit each."""

    place: Place
    checksums: bool
    noticed: int
    unnoticed: int  # wrong bytes in the blocks of the transfer, and no error
    harmless: int  # no effect: the bit had no meaning, or was not used
    elsewhere: int  # changed bytes outside the transfer
    errors: frozenset[str]


class Proxy:
    """A proxy before an engine. `alter` may change each frame of writes on the way back."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.alter: Callable[[bytes, bytes], tuple[bytes, bytes]] | None = None
        port = self._listener.getsockname()[1]
        self.address = f"kvx://127.0.0.1:{port}/{target.engine.hex()}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        server = self._target.connect()
        for each in (client, server):
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = read(client, wire.HELLO_BYTES)
        server.sendall(hello)
        lane = hello[6:7] == bytes([wire.LANE])
        threading.Thread(target=_copy, args=(client, server), daemon=True).start()
        if lane:
            client.sendall(read(server, len(wire.LANE_ACCEPTED)))
            self._copy_frames(server, client)
        else:
            _copy(server, client)

    def _copy_frames(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while len(head := read(server, 40)) == 40:
                payload = b""
                if head[0] == wire.WRITES:
                    (count,) = struct.unpack_from("<I", head, 16)
                    head += read(server, 16 * (count - 1))
                    size = sum(
                        struct.unpack_from("<I", head, 32 + 16 * index)[0] for index in range(count)
                    )
                    payload = read(server, size)
                    if self.alter is not None:
                        head, payload = self.alter(head, payload)
                client.sendall(head + payload)
        except OSError:
            pass
        _shut(server, client)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 18):
            sink.sendall(data)
    except OSError:
        pass
    _shut(source, sink)


def _shut(*socks: socket.socket) -> None:
    for each in socks:
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def altered_stream(
    place: Place, trials: int, rng: random.Random, *, checksums: bool = False
) -> Altered:
    """Runs transfers through a proxy that flips one bit of one frame of writes in each."""
    options = ("checksums",) if checksums else ()
    with workers("tcp", *options, met=False) as pair:
        proxy = Proxy(pair.prefill.target)
        outcomes = {"noticed": 0, "unnoticed": 0, "harmless": 0}
        errors: set[str] = set()
        elsewhere = 0
        for _ in range(trials):
            proxy.alter = _once(place, rng)
            found = _transfer(pair, proxy.address, _LEASES[place])
            errors |= {error.split(":")[0] for error in found[0]}
            outcome = "noticed" if found[0] else "unnoticed" if found[1] else "harmless"
            outcomes[outcome] += 1
            changed = pair.changed()
            elsewhere += changed
            if changed:
                for one in (pair.prefill, pair.decode):
                    one.ask("repaint")
        proxy.close()
    return Altered(place, checksums, **outcomes, elsewhere=elsewhere, errors=frozenset(errors))


def _once(place: Place, rng: random.Random) -> Callable[[bytes, bytes], tuple[bytes, bytes]]:
    """Returns a function that alters one of the first six frames. A transfer has more frames."""
    left = rng.randrange(6)

    def alter(head: bytes, payload: bytes) -> tuple[bytes, bytes]:
        nonlocal left
        left -= 1
        if left != -1:
            return head, payload
        if place == "header":
            return flipped(head, rng), payload
        return head, flipped(payload, rng)

    return alter


def _transfer(pair: Pair, address: str, lease: float) -> tuple[list[str], int]:
    """Runs a transfer. Returns the errors of both sides, and the number of wrong bytes in decode's
    blocks."""
    ticket = pair.ticket()
    sending = pair.prefill.begin("send", tickets=[ticket], lease=lease)
    received = pair.decode.ask("receive", tickets=[ticket], address=address, lease=lease)
    return received["errors"] + sending.result(60)["errors"], int(received["wrong"])
