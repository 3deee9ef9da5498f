"""The brokered handshake: messages from decode to the control plane, and from there to prefill.

The endpoint takes either side. Its peer and the control plane send any bytes. The engines are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
from pydantic import TypeAdapter, ValidationError

from kvxfer.client import ControlPlaneClient, calls
from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.engine import Peer
from kvxfer.errors import PeerLost, TicketInvalid
from kvxfer.kv.block_table import BlockTable, sign_block_table, verify_block_table
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.ticket import Ticket, verify_ticket
from verify.fuzz.python.choices import Choices
from verify.fuzz.python.scene import KEY, LAYOUT, Scene, World, play

DECODERS = {
    "kvxfer/kv/brokered.py": None,
    "kvxfer/kv/waiting.py": ["ExpectedOffers.[!_]*", "ExpectedOffers._forget_expired"],
    "kvxfer/client/calls.py": ["put_block_table", "block_table", "_block_table"],
    "kvxfer/record_schema.py": ["_from_base64"],
}

_CODES = (
    "unknown-block-table",
    "unknown-transfer",
    "control-plane-unavailable",
    "rate-limited",
    "ticket-invalid",
    "layout-mismatch",
    "?",
)


# Decodes a table as FastAPI does.
_TABLE = TypeAdapter(BlockTable)


def run(data: bytes) -> None:
    if data[:1] == b"\0":
        _relay(data[1:])
    else:
        play(_Scene, data[1:])


def _relay(body: bytes) -> None:
    """Checks that prefill reads a table that the control plane accepts exactly as decode sent
    it."""
    try:
        table = _TABLE.validate_json(body)
    except ValidationError:
        return
    handed_on = msgspec.json.encode(table)
    assert calls.block_table(table.offer.transfer_id).read(handed_on) == table
    try:
        verify_block_table(table, KEY, now=SYSTEM_CLOCK.unix())
    except TicketInvalid:
        return
    raise AssertionError("an unsigned block table is trusted")


class _ControlPlane(httpx2.AsyncBaseTransport):
    """A control plane that gives the queued answers and stores block tables. A request waits while
    the queue is empty."""

    def begin(self) -> None:
        self.answers: asyncio.Queue[Callable[[httpx2.Request], httpx2.Response]] = asyncio.Queue()
        self.taken: list[BlockTable] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST":
            self.taken.append(_TABLE.validate_json(await request.aread()))
        return (await self.answers.get())(request)


@functools.cache
def _control_plane() -> tuple[ControlPlaneClient, _ControlPlane]:
    control_plane = _ControlPlane()
    return ControlPlaneClient("http://control-plane", transport=control_plane), control_plane


class _Scene(Scene):
    def __init__(self, world: World, choices: Choices) -> None:
        super().__init__(world, choices)
        self.client, self.control_plane = _control_plane()
        self.control_plane.begin()

    def endpoint(self, **options: Any) -> KvEndpoint:
        knows = self.choices.byte() != 0xFF
        client = self.client if knows else None
        return super().endpoint(control_plane=client, connect_timeout=0.05, **options)

    async def play(self, endpoint: KvEndpoint, peer: Peer) -> None:
        if greeted := self.choices.flag():
            self.handler.message(peer, self.encoded(self.hello))
        if self.choices.flag():
            self.start(self.prefill(endpoint))
        for _ in range(self.choices.below(3)):
            self.start(self.decode(endpoint))
        if not greeted and self.choices.byte() == 0xFF:
            await asyncio.sleep(0.06)  # longer than the endpoint waits for a HELLO
        await self.settle()
        while self.choices and peer.alive:
            kind = self.choices.byte()
            if kind == 0xFF:
                self.handler.peer_lost(peer, PeerLost("the peer is gone"))
            elif kind == 0xFD:
                self.start(self.decode(endpoint))
            elif kind == 0xFC:
                self.start(self.prefill(endpoint))
            elif kind & 1:
                self.control_plane.answers.put_nowait(self.answer())
            else:
                self.handler.message(peer, self.message())
            await self.settle()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=0.003)
        for table in self.control_plane.taken:
            ticket = verify_block_table(table, KEY, now=SYSTEM_CLOCK.unix())
            assert ticket.decode_id == "fuzzed"

    async def prefill(self, endpoint: KvEndpoint) -> None:
        with self.pool.hold(2) as hold:
            session = await endpoint.prefill_session(
                self.tickets["to-peer"], hold, decode_address=self.world.other.address
            )
            async with session:
                for layer in range(LAYOUT.num_layers):
                    session.write_layer(layer)
                await session.finish(b"tail")

    async def decode(self, endpoint: KvEndpoint) -> None:
        lease = 30.0 if self.choices.byte() != 0xFF else 0.001
        session = await endpoint.decode_session(
            self.tickets["from-peer"], None, 2, lease_seconds=lease
        )
        async with session:
            await session.wait()
            session.take().release()

    def answer(self) -> Callable[[httpx2.Request], httpx2.Response]:
        """Returns the control plane's next answer."""
        choices = self.choices
        kind = choices.below(4)
        if kind == 0:
            return _content(200, self.table())
        if kind == 1:
            code = choices.one_of(_CODES)
            problem = {"code": code, "detail": choices.text(), "field": "f"}
            status = choices.one_of((404, 404, 403, 429, 503, 201))
            return _content(status, json.dumps(problem).encode())
        if kind == 2:
            return _content(choices.one_of((200, 201, 204, 500)), choices.bytes())
        return _hang_up

    def table(self) -> bytes:
        """Returns a block table, damaged or not; mostly under a ticket that decode may use."""
        choices = self.choices
        offer = self.offer()
        if choices.byte() != 0xFF:
            token = self.tickets["to-peer"]
            offer = msgspec.structs.replace(offer, transfer_id="to-peer", ticket=token)
        try:
            ticket = verify_ticket(offer.ticket, KEY, now=SYSTEM_CLOCK.unix())
        except TicketInvalid:
            ticket = Ticket("t", "r", "fuzzed", 1, "peer", 1, 0.0)
        with contextlib.suppress(TicketInvalid, OverflowError):
            table = sign_block_table(offer, ticket, KEY)
            damaged = choices.byte()
            if damaged == 0xFF:
                table = msgspec.structs.replace(table, mac=choices.bytes())
            elif damaged == 0xFE:
                table = msgspec.structs.replace(table, kid=choices.text())
            elif damaged == 0xFD:
                table = msgspec.structs.replace(table, decode_epoch=choices.integer())
            return msgspec.json.encode(table)
        return b""


def _content(status: int, content: bytes) -> Callable[[httpx2.Request], httpx2.Response]:
    return lambda request: httpx2.Response(status, content=content, request=request)


def _hang_up(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ReadError("hung up", request=request)
