"""A calm phase, then one act after another under the same load, and the checks of all phases."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import httpx2

from .acts import ACTS, NOTHING, Done
from .cluster import Cluster
from .load import HANG_SECONDS, Load, Sent, prompts

MAX_EXTRA_SECONDS: Final = 5.0
CALM: Final = "calm"
_T = TypeVar("_T")
# The number of requests before the first phase, and the share of the measured capacity that is
# sent: two thirds of the workers must be able to serve it while another one starts.
_WARM_UP: Final = 24
_SHARE: Final = 0.4
_RETRIES: Final = re.compile(r"^kvxfer_router_retries_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)
_TEXTS: Final = [
    f"The {thing} of a {kind} is" + " moved page by page" * length
    for thing, kind, length in (
        ("cache", "prompt", 1),
        ("weight", "layer", 2),
        ("ticket", "pair", 4),
        ("lease", "worker", 0),
        ("epoch", "fleet", 6),
        ("address", "router", 3),
    )
]


@dataclass(slots=True)
class Phase:
    """The requests that were sent during one act."""

    name: str
    sent: Sequence[Sent] = ()
    seconds: float = 0.0
    """The time until the fleet was whole again."""
    retries: int = 0
    done: Done = NOTHING

    @property
    def right(self) -> int:
        return sum(sent.right for sent in self.sent)

    @property
    def wrong(self) -> int:
        return sum(sent.wrong for sent in self.sent)

    @property
    def failed(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.failure is not None]

    @property
    def slowest(self) -> float:
        return max((sent.seconds for sent in self.sent), default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    phases: Sequence[Phase]
    open_transfers: int
    leaked_blocks: int
    continues_streams: bool = False

    def broken(self) -> list[str]:
        """Returns the broken promises, in words."""
        calm, *others = self.phases
        limit = calm.slowest + MAX_EXTRA_SECONDS
        killed = [phase.done.killed_decode for phase in others if phase.done.killed_decode]
        found = []
        for phase in self.phases:
            if phase.wrong:
                found.append(f"{phase.name}: {phase.wrong} wrong answers")
            most = limit + phase.done.outage_seconds
            if phase.slowest > most:
                found.append(
                    f"{phase.name}: a request took {phase.slowest:.2f} s, the limit is {most:.2f}"
                )
            excused = [] if self.continues_streams else killed
            if failed := sum(not _excused(sent, excused) for sent in phase.failed):
                found.append(f"{phase.name}: {failed} requests failed that should not")
        if self.open_transfers:
            found.append(f"{self.open_transfers} reservations are left")
        if self.leaked_blocks:
            found.append(f"{self.leaked_blocks} KV blocks are left on idle workers")
        return found


def _excused(sent: Sent, killed: Sequence[str]) -> bool:
    """Returns whether it is a stream whose decode worker was killed after the first token."""
    return bool(sent.tokens) and any(f" {address} " in str(sent.failure) for address in killed)


async def run(
    *,
    redis: str,
    continue_streams: bool,
    rate: float | None,
    calm_seconds: float,
    gap_seconds: float,
    threads: int,
    rng: random.Random,
    tell: Callable[[str], None],
) -> Outcome:
    expected = await asyncio.to_thread(prompts, _TEXTS)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    async with contextlib.AsyncExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(threads, redis=redis, continue_streams=continue_streams)
        )
        await cluster.settled()
        http = await stack.enter_async_context(
            httpx2.AsyncClient(
                base_url=cluster.router.url, timeout=HANG_SECONDS, limits=limits, trust_env=False
            )
        )
        # The first requests of a process are slow, so they belong to no phase.
        capacity = await Load(http, cluster.model, expected).closed(_WARM_UP, concurrency=2)
        load = Load(http, cluster.model, expected)
        rate = rate or round(capacity * _SHARE, 2)
        tell(f"{capacity:.1f} requests per second at most; {rate:g} are sent")
        running = asyncio.create_task(load.run(rate))
        phases: list[Phase] = []
        begins: list[int] = []
        try:
            begins.append(len(load.sent))
            phases.append(Phase(CALM, seconds=calm_seconds))
            await _while_running(running, asyncio.sleep(calm_seconds))
            for name, act in ACTS.items():
                phase, began = Phase(name), time.monotonic()
                begins.append(len(load.sent))
                phases.append(phase)
                retries = await _retries(http)
                phase.done = await _while_running(running, act(cluster, load, rng))
                phase.seconds = time.monotonic() - began
                await _while_running(running, asyncio.sleep(gap_seconds))
                phase.retries = await _retries(http) - retries
                tell(f"{name}: whole again after {phase.seconds:.1f} s")
        finally:
            load.stop()
        await running
        for phase, begin, end in zip(phases, begins, [*begins[1:], None], strict=True):
            phase.sent = load.sent[begin:end]
        await asyncio.to_thread(cluster.audit)
        leaked = await asyncio.to_thread(cluster.held_blocks)
        return Outcome(phases, await cluster.open_transfers(), leaked, continue_streams)


async def _while_running(running: asyncio.Task[None], step: Awaitable[_T]) -> _T:
    """Returns the result of `step`. Raises the error of the load at once if the load ends first."""
    task = asyncio.ensure_future(step)
    await asyncio.wait([running, task], return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await running
    return await task


async def _retries(http: httpx2.AsyncClient) -> int:
    """Returns the number of further attempts that the router has made so far."""
    metrics = (await http.get("/metrics")).text
    return round(sum(float(value) for value in _RETRIES.findall(metrics)))
