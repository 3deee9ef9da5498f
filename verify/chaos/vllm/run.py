"""One act after another under load, and the checks of all requests."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2

from verify.processes.programs import Server
from verify.processes.vllm.servers import make_model, references
from verify.processes.vllm.tiny_prompts import prompts

from .acts import ACTS, HEALED, NO_FAULT, Act
from .cluster import Cluster
from .load import HANG_SECONDS, MAX_TOKENS, Became, Load, Sent, requests
from .naming import Cause, Fault, Logs, Naming, naming

MAX_NAMING_SECONDS: Final = 1.0
CROWD_REQUESTS: Final = 96
CROWD_CLIENTS: Final = 24


@dataclass(slots=True)
class Phase:
    """The requests that were sent during one act."""

    name: str
    act: str
    """One of ACTS."""
    sent: list[Sent]
    fault: Fault | None = None
    naming: list[Naming] = field(default_factory=list)
    """An entry for each failed request."""
    heals: bool = False
    """True for a burst of requests through a router that retries: none may fail."""
    leaks: list[str] = field(default_factory=list)

    def count(self, became: Became) -> int:
        return sum(sent.became is became for sent in self.sent)

    def of(self, cause: Cause) -> int:
        return sum(one.cause is cause for one in self.naming)

    def broken(self) -> Iterator[str]:
        """Yields the broken promises, in words."""
        for became in (Became.WRONG, Became.HANGING):
            if number := self.count(became):
                yield f"{self.name}: {number} {became}"
        late = [one.seconds for one in self.naming if one.seconds > MAX_NAMING_SECONDS]
        if late:
            yield f"{self.name}: {len(late)} failures named late, after up to {max(late):.2f} s"
        if self.heals and (number := self.count(Became.FAILED)):
            yield f"{self.name}: {number} failed although a retry would succeed"
        if number := self.of(Cause.UNKNOWN):
            yield f"{self.name}: {number} failed without a fault"
        yield from (f"{self.name}: left behind: {leak}" for leak in self.leaks)


async def run(
    *,
    count: int,
    policy: str,
    attempts: int,
    acts: list[str],
    crowds: int,
    rng: random.Random,
    folder: Path | None,
    tell: Callable[[str], None],
) -> list[Phase]:
    with tempfile.TemporaryDirectory(prefix="kvxfer-chaos-") as temporary:
        home = folder or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        model = await asyncio.to_thread(make_model, home)
        faults = [*(name for name in HEALED if name in acts and crowds), *[NO_FAULT] * crowds]
        asked = prompts(rng, count + len(faults) * CROWD_REQUESTS)
        tell(f"getting the tokens of {len(asked)} prompts from an aggregated server")
        expected = await asyncio.to_thread(references, home, model, asked, MAX_TOKENS)
        answered = list(zip(asked, expected, strict=True))
        phases = list(_single(acts, requests(rng, answered[:count])))
        crowd = requests(rng, answered[count:], first=count, aborted=0, most_tokens=16)
        phases += _crowds(faults, crowd)
        tell("starting control plane, routers, producer and consumer")
        with Cluster(home, model, policy, attempts) as cluster:
            await cluster.settled()
            await _run(cluster, phases, rng, tell)
        return phases


def _single(acts: list[str], batch: list[Sent]) -> Iterator[Phase]:
    """Yields the phases with a few clients, whose failures reach them."""
    for number, name in enumerate(acts):
        begin, end = (len(batch) * n // len(acts) for n in (number, number + 1))
        yield Phase(name, name, batch[begin:end])


def _crowds(faults: list[str], batch: list[Sent]) -> Iterator[Phase]:
    for number, fault in enumerate(faults):
        begin = number * CROWD_REQUESTS
        name = f"crowd {number + 1}, {fault}"
        yield Phase(name, fault, batch[begin : begin + CROWD_REQUESTS], heals=True)


async def _run(
    cluster: Cluster, phases: list[Phase], rng: random.Random, tell: Callable[[str], None]
) -> None:
    logs = Logs(cluster.logs)
    following = asyncio.create_task(logs.follow())
    async with _client(cluster.router) as single, _client(cluster.usual_router) as usual:
        for phase in phases:
            name = phase.name
            if phase.heals:
                load = Load(usual, rng, clients=CROWD_CLIENTS, think_seconds=0.0)
            else:
                load = Load(single, rng)
            running = asyncio.create_task(load.run(phase.sent))
            act = ACTS[phase.act]
            if act is not None:
                phase.fault = await _strike(act, cluster, load, len(phase.sent), rng)
            await running
            await cluster.settled()
            phase.leaks = await cluster.leaks()
            for sent in phase.sent:
                if sent.became is Became.FAILED:
                    logged = logs.named.get(sent.request_id)
                    one = naming(sent, logged, phase.fault)
                    if not phase.heals:
                        phase.naming.append(one)
                    tell(
                        f"{name}: {sent.request_id} failed after {sent.ended - sent.began:.2f} s, "
                        f"named after {one.seconds:.2f} s ({one.cause.name.lower()}): "
                        f"{sent.failure}" + (f" (log: {logged[1]})" if logged else "")
                    )
            tell(f"{name}: {phase.count(Became.RIGHT)} of {len(phase.sent)} right")
    following.cancel()


def _client(router: Server) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=8)
    return httpx2.AsyncClient(
        base_url=router.url, timeout=HANG_SECONDS + 5, limits=limits, trust_env=False
    )


async def _strike(
    act: Act, cluster: Cluster, load: Load, requests: int, rng: random.Random
) -> Fault:
    """Does the act in the middle of the load."""
    after = rng.randint(requests // 6, requests // 2)
    while load.begun < after:  # noqa: ASYNC110 (a glance is enough)
        await asyncio.sleep(0.005)
    await asyncio.sleep(rng.uniform(0, 0.2))
    return await act(cluster, load, rng)
