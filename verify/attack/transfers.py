"""Attacks on transfers by an engine that has the key: tickets, block tables, messages."""

from __future__ import annotations

import asyncio
import base64
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

import jwt
import msgspec

from kvxfer.engine import Engine, Peer
from kvxfer.kv.messages import (
    Cancel,
    Done,
    Expect,
    Hello,
    Message,
    Offer,
    Refused,
    decode,
    encode,
)
from kvxfer.kv_versions import OLDEST

from .attack import Attack, Tried
from .pair import Pair
from .worker import EPOCH, KEY, LAYOUT, NUM_BLOCKS

_TICKET: Final = ("offer", ("ticket-invalid", "ticket-expired"))
_PLANES: Final = LAYOUT.num_layers * 2


def hello(instance_id: str) -> Hello:
    return Hello(
        version=OLDEST,
        instance_id=instance_id,
        epoch=EPOCH,
        layout=LAYOUT,
        num_blocks=NUM_BLOCKS,
        block_strides=((LAYOUT.part_bytes,) * 2,) * LAYOUT.num_layers,
        permutes=False,
    )


def offer(ticket: str, transfer_id: str, **changes: Any) -> Offer:
    said: dict[str, Any] = {
        "transfer_id": transfer_id,
        "ticket": ticket,
        "blocks": (0).to_bytes(4, "little") + (1).to_bytes(4, "little"),
        "grants": (b"KMR\x01" + bytes(40),) * _PLANES,
        "imm": 1 << 16,
        "lease_seconds": 5.0,
    }
    return Offer(**{**said, **changes})


def attacker(name: str, fabric: str) -> Engine:
    """Makes an engine with the key and a long timeout: its victims are busy, not dead."""
    return Engine(cluster_key=KEY, name=name, fabrics=(fabric,), peer_timeout=10)


def with_engine(
    victim: Callable[[Pair], str], act: Callable[[Peer], Awaitable[Tried]], fabric: str
) -> Callable[[Pair], Tried]:
    """Returns an attack that connects to the victim with the right key, and runs `act`."""

    async def run(pair: Pair) -> Tried:
        async with attacker("impostor", fabric) as engine:
            return await act(await engine.connect(victim(pair)))

    return lambda pair: asyncio.run(run(pair))


async def answers(peer: Peer, messages: list[Message], want: int) -> list[Message]:
    """Sends the messages. Returns the first `want` answers of the victim, without its HELLO."""
    for message in messages:
        peer.send(encode(message))
    found: list[Message] = []
    async with asyncio.timeout(20):
        while len(found) < want:
            said = decode(await peer.receive())
            if not isinstance(said, Hello):
                found.append(said)
    return found


def tickets(pair: Pair, rng: random.Random) -> Tried:
    """Sends prefill offers with bad tickets: expired, signed with another key, altered, of another
    pair or epoch, used before, or no ticket at all."""
    used = pair.claims()
    used_token = pair.ticket(transfer_id=used.transfer_id)

    def fresh(**changes: Any) -> tuple[str, str]:
        return _token(pair, **changes)

    forged: list[tuple[str, str]] = []
    for _ in range(4):
        forged += [
            fresh(expires_at=time.time() - 60),
            fresh(expires_at=1.0),
            fresh(key=rng.randbytes(32)),
            fresh(prefill_id="another"),
            fresh(prefill_epoch=EPOCH + 1),
            fresh(decode_id="another"),
            fresh(decode_epoch=EPOCH - 1),
            (uuid.uuid4().hex, fresh()[1]),  # the ticket of another transfer
            _altered(*fresh(), rng),
            _unsigned(*fresh()),
            ("", ""),
            (uuid.uuid4().hex, "." * 5000),
            (used.transfer_id, used_token),
        ]

    async def act(peer: Peer) -> Tried:
        messages: list[Message] = [hello(pair.decode.name)]
        messages.append(offer(used_token, used.transfer_id))  # the one honest use
        messages += [offer(token, transfer_id) for transfer_id, token in forged]
        found = await answers(peer, messages, len(forged))
        codes = [said.code for said in found if isinstance(said, Refused)]
        refused = sum(code in _TICKET[1] for code in codes)
        return Tried(len(forged), refused, frozenset(codes))

    return with_engine(lambda pair: pair.prefill.address, act, pair.fabric)(pair)


def _token(pair: Pair, **changes: Any) -> tuple[str, str]:
    transfer_id = uuid.uuid4().hex
    return transfer_id, pair.ticket(transfer_id=transfer_id, **changes)


def _altered(transfer_id: str, token: str, rng: random.Random) -> tuple[str, str]:
    """Returns other claims under the same signature."""
    head, payload, signature = token.split(".")
    raw = base64.urlsafe_b64decode(payload + "==")
    raw = raw.replace(b'"epoch":1', b'"epoch":%d' % rng.randint(2, 9))
    return transfer_id, f"{head}.{base64.urlsafe_b64encode(raw).decode().rstrip('=')}.{signature}"


def _unsigned(transfer_id: str, token: str) -> tuple[str, str]:
    """Returns the claims with "alg": "none", without a signature."""
    claims = jwt.decode(token, options={"verify_signature": False})
    kid = jwt.get_unverified_header(token)["kid"]
    return transfer_id, jwt.encode(claims, "", algorithm="none", headers={"kid": kid})


def tables(pair: Pair, rng: random.Random) -> Tried:
    """Sends offers with a good ticket, and with an invalid block table, grants or immediate."""
    bad: list[dict[str, Any]] = [
        {"blocks": (NUM_BLOCKS).to_bytes(4, "little")},
        {"blocks": b"\xff" * 4},
        {"blocks": bytes(8)},  # one block twice
        {"blocks": b""},
        {"blocks": b"\0" * 5},
        {"blocks": rng.randbytes(4000)},
        {"grants": ()},
        {"grants": (b"",) * (_PLANES + 1)},
        {"imm": 2**32},
        {"imm": -1},
        {"first_block": -1},
    ]
    offers: list[Message] = []
    for changes in bad:
        transfer_id, token = _token(pair)
        offers.append(offer(token, transfer_id, **changes))

    async def act(peer: Peer) -> Tried:
        found = await answers(peer, [hello(pair.decode.name), *offers], len(offers))
        codes = [said.code for said in found if isinstance(said, Refused)]
        return Tried(len(offers), len(codes), frozenset(codes))

    return with_engine(lambda pair: pair.prefill.address, act, pair.fabric)(pair)


def foreign_transfers(pair: Pair, _: random.Random) -> Tried:
    """Sends both workers DONE and CANCEL for other peers' transfers in progress."""
    names = [pair.ticket() for _ in range(12)]
    ids = [jwt.decode(name, options={"verify_signature": False})["jti"] for name in names]

    async def act(engine: Engine) -> None:
        peers = [await engine.connect(one.address) for one in (pair.prefill, pair.decode)]
        for peer, role in zip(peers, ("decode", "prefill"), strict=True):
            peer.send(encode(msgspec.structs.replace(hello("impostor"), instance_id=role)))
        sending = pair.prefill.begin("send", tickets=names)
        receiving = pair.decode.begin("receive", tickets=names, address=pair.prefill.address)
        while not receiving.done():
            for transfer_id in ids:
                for peer in peers:
                    peer.send(encode(Done(transfer_id, 0, b"wrong")))
                    peer.send(encode(Cancel(transfer_id, "because I say so")))
            await asyncio.sleep(0.005)
        received = receiving.result()
        failed.extend([*received["errors"], *sending.result(20)["errors"]])
        failed.extend(["wrong bytes"] if received["wrong"] else [])

    async def run() -> None:
        async with attacker("impostor", pair.fabric) as engine:
            await act(engine)

    failed: list[str] = []
    asyncio.run(run())
    return Tried(len(names), len(names) - len(failed), frozenset(failed))


def bombs(pair: Pair, rng: random.Random) -> Tried:
    """Sends huge, deeply nested or malformed messages: each costs the attacker a connection."""
    deep = b"\x82\xa4type\xa5offer\xa3xyz" + b"\x91" * 1_000_000
    layout = replace(LAYOUT, num_layers=1 << 16)
    payloads = [
        b"\x82\xa4type\xa5offer\xa6grants\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa5hello\xadblock_strides\xdd\x7f\xff\xff\xff",
        b"\x82\xa4type\xa5offer\xa6blocks\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa4type\xa5offer",
        deep,
        b"",
        rng.randbytes(1 << 20),
        encode(msgspec.structs.replace(hello("x"), layout=layout)),
        encode(msgspec.structs.replace(hello("x"), num_blocks=-1)),
        encode(msgspec.structs.replace(hello("x"), version=1)),
        encode(Expect("before", "its hello")),
    ]

    async def one(payload: bytes) -> bool:
        async with attacker("bomb", pair.fabric) as engine:
            peer = await engine.connect(pair.decode.address)
            peer.send(payload)
            async with asyncio.timeout(20):
                while peer.alive:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        return True

    async def run() -> int:
        return sum([await one(payload) for payload in payloads])

    return Tried(len(payloads), asyncio.run(run()))


ATTACKS: Final = (
    Attack("key holder: forged, foreign, used tickets", "prefill", _TICKET, tickets),
    Attack(
        "key holder: impossible block tables", "prefill", ("offer", ("invalid-argument",)), tables
    ),
    Attack("key holder: DONE, CANCEL of others' transfers", "decode", None, foreign_transfers),
    Attack(
        "key holder: messages that decode to huge things",
        "decode",
        ("message", ("protocol-error",)),
        bombs,
    ),
)
