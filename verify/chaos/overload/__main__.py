"""Sends three times as many requests as a pair of vLLM servers can serve.

Two tenants of the same weight share the fleet; one sends twice as much as the other. The fleet's
capacity is measured first, in the same run. Exit code 1 if it serves less than 0.9 of that, if a
lease is lost, if the tenants' mean times differ by more than 10 %, if a request fails that was not
refused, if 5 % of the refusals take more than 100 ms, or if a reservation or KV block is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import httpx2
import msgspec
from rich.table import Table

from kvxfer.cli.output import err, out, show_json
from verify.arguments import minutes_to_run
from verify.chaos.completions import Prompt
from verify.chaos.percentile import percentile
from verify.polling import eventually
from verify.processes.cores import on_cores, split_cores
from verify.processes.vllm.servers import make_model, references

from .fleet import MAX_WAITING, TENANTS, OverloadedFleet
from .load import HANG_SECONDS, MAX_TOKENS, Load, Sent

_TIMES: Final = 3
_WARM_UP_SECONDS: Final = 5.0
_SATURATED_SECONDS: Final = 30.0
_GOODPUT: Final = 0.9
_FAIR: Final = 0.1
_REFUSED_SECONDS: Final = 0.1
_IDLE_SECONDS: Final = 15.0
_PROMPTS: Final = 100
_PROMPT_TOKENS: Final = (100, 500)


class Tenant(msgspec.Struct):
    sent: int
    answered: int
    refused: int
    mean_seconds: float
    """The mean time of an answered request."""


class Outcome(msgspec.Struct):
    seconds: float
    capacity: float
    """Answers per second of a fleet whose clients wait for each answer."""
    goodput: float
    """Answers per second under overload."""
    tenants: dict[str, Tenant]
    refused_seconds: tuple[float, float]
    """The time of a refusal: median and 95th percentile."""
    failures: Mapping[str, int]
    """The number of requests that were neither answered nor refused, by the reported failure."""
    expired_leases: int
    open_transfers: int
    holders: int
    """The number of servers that still hold KV blocks when all requests have ended."""

    def broken(self) -> Iterator[str]:
        if self.goodput < _GOODPUT * self.capacity:
            yield f"goodput was {self.goodput / self.capacity:.2f} of the capacity"
        calm, loud = (self.tenants[name].mean_seconds for name in TENANTS)
        if abs(calm - loud) > _FAIR * max(calm, loud):
            yield f"the tenants' requests took {calm:.2f} and {loud:.2f} s"
        if self.refused_seconds[1] > _REFUSED_SECONDS:
            yield f"a refusal took up to {1000 * self.refused_seconds[1]:.0f} ms"
        yield from (f"{count} x {told}" for told, count in self.failures.items())
        if self.expired_leases:
            yield f"{self.expired_leases} leases were lost"
        if self.open_transfers or self.holders:
            yield f"left: {self.open_transfers} reservations, KV blocks of {self.holders} servers"


async def overload(seconds: float, rng: random.Random, tell: Callable[[str], None]) -> Outcome:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-overload-")))
        model = await asyncio.to_thread(make_model, folder)
        tell(f"getting the tokens of {_PROMPTS} prompts from one server")
        asked = [
            [rng.randrange(3, 512) for _ in range(rng.randint(*_PROMPT_TOKENS))]
            for _ in range(_PROMPTS)
        ]
        expected = await asyncio.to_thread(references, folder, model, asked, MAX_TOKENS)
        prompts = [Prompt(*each) for each in zip(asked, expected, strict=True)]
        tell("starting control plane, router, producer and consumer")
        core, others = split_cores()
        stack.enter_context(on_cores(others))
        fleet = stack.enter_context(OverloadedFleet(folder, model, core))
        await fleet.settled()
        http = {
            tenant: await stack.enter_async_context(
                httpx2.AsyncClient(
                    base_url=fleet.router.url,
                    headers={"Authorization": f"Bearer {key}"},
                    timeout=HANG_SECONDS,
                    limits=httpx2.Limits(max_connections=None, max_keepalive_connections=256),
                    trust_env=False,
                )
            )
            for tenant, key in fleet.keys.items()
        }
        clients = MAX_WAITING // len(TENANTS)
        tell("measuring the fleet's capacity")
        # The first requests of a process are slow.
        await Load(http, prompts).saturate(_WARM_UP_SECONDS, clients)
        capacity = await Load(http, prompts).saturate(_SATURATED_SECONDS, clients)
        tell(f"{_TIMES * capacity:.1f} requests per second for {seconds:.0f} s")
        load = Load(http, prompts)
        goodput = await load.overload(_TIMES * capacity, seconds, rng)

        async def given_back() -> bool:
            held = await asyncio.to_thread(fleet.holding)
            return not held and not await asyncio.to_thread(fleet.client.transfers)

        with contextlib.suppress(TimeoutError):
            await eventually(given_back, _IDLE_SECONDS)
        refused = [one.seconds for one in load.sent if one.refused] or [0.0]
        failures = [one.failure for one in load.sent if one.failure and not one.refused]
        return Outcome(
            seconds=seconds,
            capacity=capacity,
            goodput=goodput,
            tenants={name: _tenant(name, load.sent) for name in TENANTS},
            refused_seconds=(percentile(refused, 0.5), percentile(refused, 0.95)),
            failures=Counter(failures),
            expired_leases=await asyncio.to_thread(fleet.expired_leases),
            open_transfers=len(await asyncio.to_thread(fleet.client.transfers)),
            holders=await asyncio.to_thread(fleet.holding),
        )


def _tenant(name: str, all_sent: list[Sent]) -> Tenant:
    sent = [one for one in all_sent if one.tenant == name]
    times = [one.seconds for one in sent if one.right]
    return Tenant(
        sent=len(sent),
        answered=len(times),
        refused=sum(one.refused for one in sent),
        mean_seconds=statistics.fmean(times) if times else 0.0,
    )


def _show(outcome: Outcome) -> None:
    table = Table(
        title=f"{_TIMES} times the capacity, {outcome.seconds:.0f} s", title_justify="left"
    )
    for column in ("tenant", "sent", "answered", "refused", "mean s"):
        table.add_column(column, justify="left" if column == "tenant" else "right")
    for name, each in outcome.tenants.items():
        table.add_row(
            name, *map(str, (each.sent, each.answered, each.refused)), f"{each.mean_seconds:.2f}"
        )
    out.print(table)
    p50, p95 = (1000 * each for each in outcome.refused_seconds)
    out.print(
        f"capacity {outcome.capacity:.1f} per second, goodput "
        f"{outcome.goodput / outcome.capacity:.2f} of it; "
        f"refused within {p50:.0f} ms (p50), {p95:.0f} ms (p95)",
        highlight=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos SUITE=overload", description=__doc__)
    parser.add_argument("--minutes", type=minutes_to_run, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    err.print(f"seed {seed}", highlight=False)
    with err.status("making a model") as status:
        outcome = asyncio.run(overload(60 * options.minutes, random.Random(seed), status.update))
    broken = list(outcome.broken())
    if options.json:
        show_json({**msgspec.to_builtins(outcome), "broken": broken})
    else:
        _show(outcome)
    for line in broken:
        err.print(f"[bold red]not held[/] {line}", highlight=False, soft_wrap=True)
    if not broken and not options.json:
        answered = sum(each.answered for each in outcome.tenants.values())
        out.print(f"proved: {answered:,} requests answered under overload, fairly", highlight=False)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
