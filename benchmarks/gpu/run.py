"""Prompts through two processes on one GPU, and through one."""

from __future__ import annotations

import asyncio
import random
import secrets
import uuid
from multiprocessing.connection import Connection

from benchmarks.gpu.decode import Ask, start_decode
from benchmarks.gpu.figures import Row, Run
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.worker import EPOCH, Worker, make_model, worker
from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.kv import PrefillSession, Ticket, sign_ticket
from kvxfer.reference.model import LlamaModel

_SECONDS = 300  # the validity of a ticket
_WARM_UP = 1  # runs


async def run_bench(settings: Settings) -> list[Row]:
    """Measures each fabric and each length. The runs of each kind follow one another."""
    model = make_model(settings)
    rows = []
    for fabric in settings.fabrics:
        rows += await _measure(fabric, settings, model)
    return rows


async def _measure(fabric: str, settings: Settings, model: LlamaModel) -> list[Row]:
    key = secrets.token_hex(16)
    pipe, process = start_decode(fabric, key, settings)
    try:
        async with worker("prefill", fabric, key, settings, model) as prefill:
            await asyncio.to_thread(pipe.recv)  # decode is ready
            rows = []
            for length in settings.lengths:
                rng = random.Random(length)
                prompt = [rng.randrange(settings.config.vocab_size) for _ in range(length)]
                rounds = range(settings.repeats + _WARM_UP)
                apart = [await _apart(prefill, pipe, key, prompt) for _ in rounds]
                alone = [await _alone(prefill, settings, prompt) for _ in rounds]
                rows.append(Row(fabric, length, tuple(apart[_WARM_UP:]), tuple(alone[_WARM_UP:])))
            pipe.send(None)
            return rows
    finally:
        pipe.close()
        await asyncio.to_thread(process.join)


async def _apart(prefill: Worker, pipe: Connection, key: str, prompt: list[int]) -> Run:
    """Runs prefill here, and decode in the other process."""
    now = SYSTEM_CLOCK.unix()
    ticket = sign_ticket(
        Ticket(uuid.uuid4().hex, "", "prefill", EPOCH, "decode", EPOCH, now + _SECONDS), key
    )
    num_blocks = prefill.runner.blocks_for(len(prompt), 1)
    begun = SYSTEM_CLOCK.monotonic()
    pipe.send(Ask(ticket, prefill.engine.address, len(prompt)))
    with prefill.pool.hold(num_blocks) as hold:
        async with prefill.endpoint.prefill_session(ticket, hold) as session:
            first, computed_at = await prefill.compute.run(
                lambda: _compute(prefill, prompt, hold.ids.tolist(), session)
            )
            await session.finish(first.to_bytes(4, "big"))
            nbytes = session.nbytes
    told = await asyncio.to_thread(pipe.recv)
    return Run(told.complete_at - begun, computed_at - begun, nbytes, (first, *told.tokens))


def _compute(
    prefill: Worker, prompt: list[int], blocks: list[int], session: PrefillSession
) -> tuple[int, float]:
    """Returns the first token, and when it was known."""
    order = prefill.order

    def on_layer(layer: int) -> None:
        session.write_layer(layer, after=None if order is None else order.mark())

    first = prefill.runner.prefill(prompt, blocks, on_layer)
    return first, SYSTEM_CLOCK.monotonic()


async def _alone(prefill: Worker, settings: Settings, prompt: list[int]) -> Run:
    """Runs both in this process, with the same cache and no transfer."""
    begun = SYSTEM_CLOCK.monotonic()
    with prefill.pool.hold(settings.blocks_for(len(prompt))) as hold:
        blocks = hold.ids.tolist()
        first = await prefill.compute.run(lambda: prefill.runner.prefill(prompt, blocks))
        first_at = SYSTEM_CLOCK.monotonic() - begun
        steps = prefill.runner.decode(first, len(prompt), blocks, settings.tokens)
        rest = await prefill.compute.run(lambda: list(steps))
    return Run(first_at, first_at, 0, (first, *rest))
