"""Random orders of all events of a transfer, over engines that the test steers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import (
    KvxferError,
    PeerLost,
)
from kvxfer.kv.block_pool import BlockState
from kvxfer.kv.session_state import DecodeState, PrefillState
from kvxfer.layout import KvLayout
from kvxfer.ticket import Ticket, sign_ticket
from tests.virtual_time import passes

from .pair import KEY, POOL, Side
from .steered import Network, Write
from .workers import heads_by_token

LAYERS, TOKENS = 3, 4
ROUNDS = 600


class Round:
    """One transfer with a random order and random faults."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        layout = KvLayout(
            num_layers=LAYERS,
            num_kv_heads=rng.choice([1, 2]),
            head_size=4,
            dtype="uint8",
            block_size=2,
            order=rng.choice(["NHD", "HND"]),
            kv=rng.choice(["separate", "interleaved"]),
        )
        other = replace(
            layout,
            block_size=rng.choice([1, 2]),
            order=rng.choice(["NHD", "HND"]),
            kv=rng.choice(["separate", "interleaved"]),
        )
        self.prefill, self.decode = Side("prefill", layout), Side("decode", other)
        self.network = Network(self.prefill.engine, self.decode.engine)
        self.network.random = rng
        self.network.max_queued = rng.choice([1, 3, 100])
        self.network.max_messages = rng.choice([1, 3, 100])
        self.network.landing = self.check_landing
        self.ticket = sign_ticket(
            Ticket("t", "r", "prefill", 1, "decode", 1, self.prefill.endpoint.clock.unix() + 60),
            KEY,
        )
        # A task that is cancelled before it runs keeps this outcome.
        self.outcomes: dict[str, object] = dict.fromkeys(("prefill", "decode"), "task cancelled")
        self.sent = self.received = b""
        self.prefill_session: Any = None
        self.decode_session: Any = None

    def check_landing(self, write: Write) -> None:
        """Checks that no byte lands in, or is read from, a block that its pool may give to another
        request."""
        target = self.decode.pool.state(self.decode.block_of(write.destination, write.dst))
        assert target in (BlockState.OFFERED, BlockState.RECEIVING)
        source = self.prefill.pool.state(self.prefill.block_of(write.source, write.src))
        assert source is BlockState.HELD

    async def run_prefill(self) -> None:
        await self.pause()
        with self.prefill.pool.hold(self.prefill.cache.layout.blocks_for(TOKENS)) as hold:
            blocks = hold.ids.tolist()
            for layer in range(LAYERS):
                for part in self.prefill.cache.layout.parts:
                    plane = np.frombuffer(self.prefill.cache.buffer(layer, part), np.uint8)
                    plane[:] = np.frombuffer(self.rng.randbytes(len(plane)), np.uint8)
            self.sent = heads_by_token(self.prefill.cache, blocks).tobytes()
            async with self.prefill.endpoint.prefill_session(self.ticket, hold) as session:
                self.prefill_session = session
                if self.rng.random() < 0.5:
                    hold.release()  # takes effect when no read is under way
                layers = list(range(LAYERS))
                self.rng.shuffle(layers)
                for layer in layers:
                    await self.pause()
                    session.write_layer(layer)
                await self.pause()
                await session.finish(b"tail")
        assert session.state is PrefillState.DELIVERED

    async def run_decode(self) -> None:
        await self.pause()
        while self.rng.random() < 0.3:
            await self.decode.endpoint.keep(self.ticket, "kvx://prefill")
            await self.pause()
        session = await self.decode.endpoint.decode_session(
            self.ticket, "kvx://prefill", self.decode.cache.layout.blocks_for(TOKENS)
        )
        async with session:
            self.decode_session = session
            assert await session.wait() == b"tail"
            await self.pause()
            with session.take() as hold:
                blocks = hold.ids.tolist()
                self.received = heads_by_token(self.decode.cache, blocks).tobytes()

    async def pause(self) -> None:
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(0)

    async def work(self, name: str) -> None:
        try:
            await (self.run_prefill() if name == "prefill" else self.run_decode())
            self.outcomes[name] = "ok"
        except KvxferError as error:
            self.outcomes[name] = error

    def fault(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        session = self.rng.choice([self.prefill_session, self.decode_session])
        kind = self.rng.choice(["cancel", "lose", "lease", "task"])
        if kind == "lose" and self.prefill.engine.peer is not None:
            self.network.lose(PeerLost("the cable was pulled"))
        elif kind == "task":
            tasks[self.rng.choice(list(tasks))].cancel()
        elif session is None:
            return
        elif kind == "lease":
            session._lease_over()
        else:
            self.background = asyncio.ensure_future(session.cancel("fault"))

    async def run(self) -> None:
        async with self.prefill.endpoint, self.decode.endpoint:
            tasks = {name: asyncio.create_task(self.work(name)) for name in ("prefill", "decode")}
            fault_at = self.rng.randrange(70)
            for step in range(5000):
                if step == fault_at:
                    self.fault(tasks)
                steps = self.network.steps()
                if steps and self.rng.random() < 0.7:
                    self.rng.choice(steps)()
                # The work of a thread takes time, but no steps.
                await passes(0.001 if self.permuting() and not steps else 0)
                alone = [name for name, task in tasks.items() if task.done()]
                if len(alone) == 2 and not self.network.steps():
                    break
                if len(alone) == 1 and self.outcomes[alone[0]] != "ok":
                    self.end_a_wait_that_only_its_lease_ends()
            else:
                pytest.fail(f"no end: {self.outcomes}, {self.prefill_session}")
            for task in tasks.values():
                if not task.cancelled():
                    task.result()
        self.check()

    def end_a_wait_that_only_its_lease_ends(self) -> None:
        """Ends the lease of a side whose partner never sent an OFFER or came to a session."""
        waiting = self.prefill_session
        if waiting is not None and waiting.state is PrefillState.WAITING and self.network_idle():
            waiting._lease_over()
        waiting = self.decode_session
        if waiting is not None and waiting.state is DecodeState.OFFERED and self.network_idle():
            waiting._lease_over()

    def permuting(self) -> bool:
        """Whether a thread is reordering heads."""
        session = self.decode_session
        future = None if session is None else session._arranging
        return future is not None and not future.done()

    def network_idle(self) -> bool:
        return not self.network.steps()

    def check(self) -> None:
        for side in (self.prefill, self.decode):
            side.pool.check()
            assert side.pool.num_free == POOL, side.pool.counts()
            assert not any(counter.live for counter in side.engine.counters.values())
        if self.outcomes["prefill"] == "ok":
            assert self.prefill_session.state is PrefillState.DELIVERED
        if self.received:
            assert self.received == self.sent
        if self.outcomes["decode"] == "ok":
            assert self.received


async def test_no_order_of_events_leaks_a_block_or_lands_a_byte_late(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.kv.prefill_session._BACKPRESSURE_SECONDS", 0)
    monkeypatch.setattr("kvxfer.kv.connection.RETRY_SECONDS", 0)
    ends: dict[str, int] = {}
    for _ in range(ROUNDS):
        seed = rng.getrandbits(32)
        try:
            one = Round(random.Random(seed))
            await asyncio.wait_for(one.run(), 20)
        except BaseException:
            print(f"round seed {seed}")
            raise
        key = " / ".join(
            value if isinstance(value, str) else type(value).__name__
            for value in (one.outcomes["prefill"], one.outcomes["decode"])
        )
        ends[key] = ends.get(key, 0) + 1
    print(ends)
    assert not any("ProtocolError" in key for key in ends)
    assert ends["ok / ok"] > ROUNDS // 20
    assert sum(count for key, count in ends.items() if "TransferCancelled" in key) > ROUNDS // 20
