"""The decode process: receives caches, and goes on from them."""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from benchmarks.gpu.settings import BLOCK_SIZE, Settings
from benchmarks.gpu.worker import Worker, make_model, worker
from kvxfer.clock import SYSTEM_CLOCK


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to receive one prompt that prefill computes."""

    ticket: str
    prefill_address: str
    length: int


@dataclass(frozen=True, slots=True)
class Told:
    """The outcome. All processes of a host have the same clock."""

    complete_at: float
    """The time when the cache and the first token had arrived."""
    tokens: list[int]
    """The tokens after the first."""


def decode_process(pipe: Connection, fabric: str, key: str, settings: Settings) -> None:
    """Sends None when it is ready. Answers each `Ask` with a `Told`. Ends at the first None."""
    asyncio.run(_serve(pipe, fabric, key, settings))


def start_decode(fabric: str, key: str, settings: Settings) -> tuple[Connection, SpawnProcess]:
    """Starts the process, which ends with this one. Returns this end of its pipe, and it."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    arguments = (there, fabric, key, settings)
    process = spawn.Process(target=decode_process, args=arguments, daemon=True)
    process.start()
    there.close()
    return here, process


async def _serve(pipe: Connection, fabric: str, key: str, settings: Settings) -> None:
    async with worker("decode", fabric, key, settings, make_model(settings)) as decode:
        pipe.send(None)
        while (ask := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await _decode(decode, ask, settings.tokens))


async def _decode(decode: Worker, ask: Ask, tokens: int) -> Told:
    blocks = -(-ask.length // BLOCK_SIZE)
    async with decode.endpoint.decode_session(ask.ticket, ask.prefill_address, blocks) as session:
        first = int.from_bytes(await session.wait(), "big")
        complete_at = SYSTEM_CLOCK.monotonic()
        received = session.take()
    with received, decode.pool.hold(1) as more:
        table = [*received.ids.tolist(), *more.ids.tolist()]
        steps = decode.runner.decode(first, ask.length, table, tokens)
        return Told(complete_at, await decode.compute.run(lambda: list(steps)))
