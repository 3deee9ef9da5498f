"""Alters one bit of a worker's answer in a handshake: the dialing engine must detect it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from typing import Final

from kvxfer.engine import Engine
from kvxfer.errors import EngineError

from . import wire
from .attack import Attack, Tried
from .hostile import Target, flipped, read
from .pair import Pair
from .worker import KEY

_MANY: Final = 20


def altered_answers(pair: Pair, rng: random.Random) -> Tried:
    """Connects an honest engine to decode. Changes one bit of decode's reply or accept."""
    return asyncio.run(_dial(pair, rng))


async def _dial(pair: Pair, rng: random.Random) -> Tried:
    errors = []
    async with Engine(cluster_key=KEY, name="honest", fabrics=(pair.fabric,)) as engine:
        for index in range(_MANY):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                relay = threading.Thread(
                    target=_relay, args=(listener, pair.decode.target, index % 2 == 0, rng)
                )
                relay.start()
                place = listener.getsockname()[1]
                address = f"kvx://127.0.0.1:{place}/{pair.decode.target.engine.hex()}"
                try:
                    await engine.connect(address, timeout=1.0)
                except EngineError as error:
                    errors.append(error.code)
                relay.join()
        peers = len(engine.peers)
    return Tried(_MANY, len(errors) if peers == 0 else 0, frozenset(errors))


def _relay(listener: socket.socket, target: Target, in_reply: bool, rng: random.Random) -> None:
    client, _ = listener.accept()
    with client, target.connect() as server, contextlib.suppress(OSError):
        client.settimeout(3)
        server.sendall(read(client, wire.HELLO_BYTES))
        reply = read(server, wire.REPLY_BYTES)
        client.sendall(flipped(reply, rng) if in_reply else reply)
        head = read(client, wire.PROOF_BYTES)
        if len(head) < wire.PROOF_BYTES:
            return  # the client has closed
        server.sendall(head + read(client, int.from_bytes(head[2:4], "little")))
        head = read(server, wire.PROOF_BYTES)
        accept = head + read(server, int.from_bytes(head[2:4], "little"))
        client.sendall(flipped(accept, rng))
        client.recv(1)  # until the client closes


ATTACKS: Final = (Attack("bits flipped in the answers", "decode", None, altered_answers),)
